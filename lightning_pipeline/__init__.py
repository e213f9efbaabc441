"""Pipeline-parallel training for PyTorch Lightning."""
