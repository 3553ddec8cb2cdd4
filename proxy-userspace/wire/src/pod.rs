//! Encodes and decodes the pods whose annotation says how their sockets are served.

use std::sync::Arc;

use model::{
    NameForm,
    state::{Pod, SocketLb},
};
use proxy_contract::localv1::{self, pod};

use crate::reader::{Decoded, Reader};

/// Encodes a pod.
pub fn pod(it: &Pod) -> localv1::Pod {
    let (namespace, name) = it.name.split_once('/').unwrap_or_default();
    let socket_lb = match it.socket_lb {
        SocketLb::Off => pod::SocketLb::Off,
        SocketLb::TcpOnly => pod::SocketLb::TcpOnly,
    };
    localv1::Pod {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        uid: it.uid.to_string(),
        socket_lb: socket_lb.into(),
    }
}

/// Decodes the pod `namespace/name`; none if its name is invalid, or an unknown version's annotation is meant.
pub(crate) fn decode_pod(path: &Arc<str>, message: &localv1::Pod) -> Decoded<Option<Pod>> {
    let mut reader = Reader::new(&format!("pod {path}"));
    let (namespace, name) = path.split_once('/').unwrap_or_default();
    let is_named = reader.accepts("namespace", namespace, NameForm::DnsLabel)
        & reader.accepts("name", name, NameForm::DnsSubdomain)
        & reader.accepts("uid", &message.uid, NameForm::DnsLabel);
    let socket_lb = match pod::SocketLb::try_from(message.socket_lb) {
        Ok(pod::SocketLb::Off) => Some(SocketLb::Off),
        Ok(pod::SocketLb::TcpOnly) => Some(SocketLb::TcpOnly),
        Ok(pod::SocketLb::UnknownSockets) | Err(_) => {
            reader
                .reject("socket_lb", format!("unknown value {}; all sockets are served", message.socket_lb));
            None
        }
    };
    let pod = socket_lb.filter(|_| is_named).map(|socket_lb| Pod {
        name: Arc::clone(path),
        uid: message.uid.as_str().into(),
        socket_lb,
    });
    reader.finish(pod)
}
