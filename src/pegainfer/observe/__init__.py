"""Records of what was served: access log and traces."""
