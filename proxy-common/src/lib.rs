//! What the kernel side and user space share: map layouts and the decision logic.
