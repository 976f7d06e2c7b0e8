"""A toy model line with two kinds of state, written as docs/adding-a-model-line.md says: every layer has a
recurrent mixer (causal convolution and gated delta rule) and attention over pages. Only tests register it.
"""
