"""The null device: a runner that computes tokens by arithmetic, and checks every plan that it gets."""
