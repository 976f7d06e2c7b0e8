"""What page-based model lines share on a device: slot-resident state, staging of plans, the KV pool."""
