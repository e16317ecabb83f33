"""`python -m blockdraft`, which `torchrun -m` starts."""

from blockdraft.cli.main import main

if __name__ == "__main__":
    main()
