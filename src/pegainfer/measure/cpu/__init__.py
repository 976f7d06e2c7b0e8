"""Op bench and roofline of the CPU."""
