"""Training of EAGLE-3 draft heads on conversations that the target writes itself."""
