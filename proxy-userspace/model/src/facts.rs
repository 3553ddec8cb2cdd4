//! What a cluster says: Services, EndpointSlices and Nodes, reduced to what the brain reads.
