"""What runs on an accelerator runs on a test device, and comes out as on the CPU."""
