//! The gRPC status of each error.

use publish::SubscribeError;
use tonic::Status;

/// The status of a request for the state of `node`, which is not available.
pub(crate) fn of_subscription(error: &SubscribeError, node: &str) -> Status {
    let message = format!("node {:?}: {error}", node.chars().take(80).collect::<String>());
    match error {
        SubscribeError::NotServed => Status::not_found(message),
        SubscribeError::NoClusterState => Status::failed_precondition(message),
        SubscribeError::InvalidName => Status::invalid_argument(message),
        SubscribeError::TooManyUnknownNodes(_) => Status::resource_exhausted(message),
        SubscribeError::ShuttingDown => Status::unavailable(message),
    }
}
