//! The contract keeps what the last release had: `released.binpb` is the descriptor set of that release, which
//! `cargo xtask dist` makes.

#![expect(clippy::unwrap_used, reason = "a failed helper fails the test")]

use std::collections::BTreeMap;

use prost::Message as _;
use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet, field_descriptor_proto,
};

const RELEASED: &[u8] = include_bytes!("released.binpb");

/// What a program that was built against the contract relies on: each thing by its name, with its numbers and types.
fn relied_on(descriptors: &[u8]) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for file in FileDescriptorSet::decode(descriptors).unwrap().file {
        let package = file.package().to_owned();
        for it in &file.message_type {
            message(&mut found, &package, it);
        }
        for it in &file.enum_type {
            enumeration(&mut found, &package, it);
        }
        for service in &file.service {
            for it in &service.method {
                let shape = format!(
                    "stream {}: {} -> stream {}: {}",
                    it.client_streaming(),
                    it.input_type(),
                    it.server_streaming(),
                    it.output_type()
                );
                found.insert(format!("{package}.{}/{}", service.name(), it.name()), shape);
            }
        }
    }
    found
}

fn message(found: &mut BTreeMap<String, String>, parent: &str, it: &DescriptorProto) {
    let name = format!("{parent}.{}", it.name());
    for field in &it.field {
        found.insert(format!("{name}.{}", field.name()), shape(it, field));
    }
    for nested in &it.nested_type {
        message(found, &name, nested);
    }
    for nested in &it.enum_type {
        enumeration(found, &name, nested);
    }
    found.insert(name, "message".to_owned());
}

fn shape(message: &DescriptorProto, field: &FieldDescriptorProto) -> String {
    let oneof =
        field.oneof_index.and_then(|it| usize::try_from(it).ok()).map(|it| message.oneof_decl[it].name());
    let is_repeated = field.label() == field_descriptor_proto::Label::Repeated;
    format!(
        "{} = {:?} {}, repeated: {is_repeated}, oneof: {oneof:?}, optional: {}",
        field.number(),
        field.r#type(),
        field.type_name(),
        field.proto3_optional(),
    )
}

fn enumeration(found: &mut BTreeMap<String, String>, parent: &str, it: &EnumDescriptorProto) {
    for value in &it.value {
        found.insert(format!("{parent}.{}.{}", it.name(), value.name()), value.number().to_string());
    }
}

/// What `new` lacks of `old`, or has with another number or type.
fn broken(old: &[u8], new: &[u8]) -> Vec<String> {
    let new = relied_on(new);
    let differs = |(name, shape): (String, String)| match new.get(&name) {
        Some(it) if *it == shape => None,
        Some(it) => Some(format!("{name} was {shape}, and is {it}")),
        None => Some(format!("{name} ({shape}) is missing")),
    };
    relied_on(old).into_iter().filter_map(differs).collect()
}

#[test]
fn numbers_types_and_names_of_the_last_release_are_kept() {
    let broken = broken(RELEASED, proxy_contract::DESCRIPTORS);
    assert!(broken.is_empty(), "add fields with new numbers instead:\n{}", broken.join("\n"));
    assert!(relied_on(RELEASED).len() > 100);
}

#[test]
fn every_kind_of_break_is_found() {
    type Change = fn(&mut FileDescriptorSet);
    fn service(set: &mut FileDescriptorSet) -> &mut DescriptorProto {
        let mut files = set.file.iter_mut();
        let messages = &mut files.find(|it| it.package() == "localv1").unwrap().message_type;
        messages.iter_mut().find(|it| it.name() == "Service").unwrap()
    }
    let changes: [Change; 7] = [
        |it| service(it).field[0].number = Some(99),
        |it| service(it).field[0].name = Some("other".to_owned()),
        |it| service(it).field[0].set_type(field_descriptor_proto::Type::Bytes),
        |it| service(it).field[0].set_label(field_descriptor_proto::Label::Repeated),
        |it| drop(service(it).field.pop()),
        |it| it.file[0].service[0].method[0].client_streaming = Some(false),
        |it| it.file[0].enum_type[0].value[1].number = Some(77),
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let mut set = FileDescriptorSet::decode(RELEASED).unwrap();
        change(&mut set);
        assert_eq!(broken(RELEASED, &set.encode_to_vec()).len(), 1, "change {index}");
    }
    let mut set = FileDescriptorSet::decode(RELEASED).unwrap();
    let more =
        FieldDescriptorProto { name: Some("more".to_owned()), number: Some(999), ..Default::default() };
    service(&mut set).field.push(more);
    assert_eq!(broken(RELEASED, &set.encode_to_vec()), [""; 0], "an addition is allowed");
}

/// The parts of the specification, each with its heading.
fn specification() -> Vec<String> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/contract.md");
    let text = std::fs::read_to_string(path).unwrap();
    text.split("\n#").map(str::to_owned).collect()
}

#[test]
fn the_specification_names_every_message_field_and_value() {
    let parts = specification();
    let names = |part: &String, name: &str| part.contains(&format!("`{name}`"));
    let of_message = |name: &str| parts.iter().filter(|it| names(it, name)).collect::<Vec<_>>();
    let mut missing = Vec::new();
    let mut count = 0;
    for file in FileDescriptorSet::decode(proxy_contract::DESCRIPTORS).unwrap().file {
        let package = file.package().to_owned();
        let mut enums: Vec<_> = file.enum_type.iter().collect();
        for message in &file.message_type {
            enums.extend(&message.enum_type);
            let name = format!("{package}.{}", message.name());
            let parts = of_message(&name);
            if parts.is_empty() {
                missing.push(name.clone());
            }
            for field in &message.field {
                count += 1;
                if !parts.iter().any(|it| names(it, field.name())) {
                    missing.push(format!("{name}.{}", field.name()));
                }
            }
        }
        for value in enums.into_iter().flat_map(|it| &it.value).filter(|it| !it.name().starts_with("Unknown"))
        {
            if !parts.iter().any(|it| names(it, value.name())) {
                missing.push(value.name().to_owned());
            }
        }
        for service in &file.service {
            let paths = service.method.iter().map(|it| format!("{package}.{}/{}", service.name(), it.name()));
            missing.extend(paths.filter(|it| !parts.iter().any(|part| names(part, it))));
        }
    }
    assert!(missing.is_empty(), "docs/contract.md does not describe {}", missing.join(", "));
    assert!(count > 100);
}
