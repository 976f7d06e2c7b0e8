"""What the rooms agree on: frozen types, protocols and errors. Imports nothing local."""
