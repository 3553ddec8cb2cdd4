//! Where facts come from: manifests, an API server, another brain.
