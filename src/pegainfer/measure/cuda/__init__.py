"""Op bench, step bench, roofline and checks of GPUs."""
