"""What a forward pass is made of. Each op is declared once, with reference, inputs, tolerance and cost."""
