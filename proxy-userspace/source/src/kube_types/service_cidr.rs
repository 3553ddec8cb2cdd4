//! Converts `networking.k8s.io/v1 ServiceCIDR`.

use model::{NameForm, state};

use super::{
    conversion::{Converted, validator},
    objects,
};

/// Limit of the ranges in Kubernetes: one of each family.
const MAX_CIDRS: usize = 2;

pub fn service_cidr(it: &objects::ServiceCidr) -> Converted<state::ServiceCidr> {
    let mut validator = validator("ServiceCIDR", &it.metadata);
    let name = it.metadata.name.as_deref().unwrap_or("");
    let name = validator.name("metadata.name", name, NameForm::DnsSubdomain);
    let cidrs = it.spec.as_ref().and_then(|it| it.cidrs.as_deref());
    let cidrs = validator.limited("spec.cidrs", cidrs, MAX_CIDRS).iter().enumerate();
    let cidrs =
        cidrs.filter_map(|(index, it)| validator.cidr(format_args!("spec.cidrs[{index}]"), it)).collect();
    let object = name.map(|name| state::ServiceCidr { name, cidrs });
    Converted { object, rejected: validator.into_rejected() }
}
