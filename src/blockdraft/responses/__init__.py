"""Responses that the verifier writes for training data: in process, or by a server that was probed before."""
