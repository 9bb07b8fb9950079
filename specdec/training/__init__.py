"""Training of drafts: losses, cached target states, SPIRe's k-pass forward, and one call that trains."""
