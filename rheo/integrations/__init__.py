"""RheoSampling inside other projects."""
