//! The container image for every machine, as an archive in the format of the OCI, written without a container tool.
//! Invariant: equal binaries make an equal archive.

use std::collections::BTreeMap;

use anyhow::Result;
use build_tools::{container::IMAGE, machine::Machine};
use serde_json::{Value, json};

use crate::archive::{Entry, gzip, sha256, tar};

const BINARY: &str = "usr/local/bin/kube-proxy-ebpf";
const LICENSE: &str = "usr/share/doc/kube-proxy-ebpf/LICENSE";
const VERSION: &str = env!("CARGO_PKG_VERSION");

pub(crate) struct Image {
    pub(crate) archive: Vec<u8>,
    /// What names it in every registry, as `sha256:…`.
    pub(crate) digest: String,
}

/// The blobs of an image, by digest.
#[derive(Default)]
struct Blobs(BTreeMap<String, Vec<u8>>);

impl Blobs {
    /// Adds a blob; returns what refers to it.
    fn add(&mut self, media_type: &str, bytes: Vec<u8>) -> Value {
        let (digest, size) = (sha256(&bytes), bytes.len());
        self.0.insert(digest.clone(), bytes);
        let media_type = format!("application/vnd.oci.image.{media_type}");
        json!({ "mediaType": media_type, "digest": format!("sha256:{digest}"), "size": size })
    }

    fn add_json(&mut self, media_type: &str, value: &Value) -> Result<Value> {
        Ok(self.add(media_type, serde_json::to_vec(value)?))
    }
}

/// The image of these binaries, for their machines.
///
/// It has one layer: the binary, which needs no library, and the license. The client of the API server trusts the
/// certificates that a service account or kubeconfig names, so the image has none.
pub(crate) fn image(binaries: &[(Machine, Vec<u8>)], license: &[u8], revision: &str) -> Result<Image> {
    let mut blobs = Blobs::default();
    let mut manifests = Vec::new();
    for (machine, binary) in binaries {
        let files = vec![Entry::new(BINARY, &**binary).executable(), Entry::new(LICENSE, license)];
        let layer = tar(files, true)?;
        let platform = json!({ "architecture": machine.debian(), "os": "linux" });
        let config = json!({
            "architecture": machine.debian(),
            "os": "linux",
            "config": config(revision),
            "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{}", sha256(&layer))] },
            "history": [{ "created_by": "cargo xtask dist" }],
        });
        let layer = blobs.add("layer.v1.tar+gzip", gzip(&layer)?);
        let config = blobs.add_json("config.v1+json", &config)?;
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": config,
            "layers": [layer],
        });
        let mut manifest = blobs.add_json("manifest.v1+json", &manifest)?;
        manifest["platform"] = platform;
        manifests.push(manifest);
    }
    let index = |manifests: Vec<Value>| {
        json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": manifests,
        })
    };
    // One entry for all machines: tools copy the image as a whole.
    let mut all = blobs.add_json("index.v1+json", &index(manifests))?;
    let digest = all["digest"].as_str().unwrap_or_default().to_owned();
    // By the second, containerd (`ctr`, `nerdctl`, `kind load`) names it.
    all["annotations"] = json!({
        "org.opencontainers.image.ref.name": VERSION,
        "io.containerd.image.name": IMAGE,
    });
    let mut files = vec![
        Entry::new("oci-layout", r#"{"imageLayoutVersion":"1.0.0"}"#),
        Entry::new("index.json", serde_json::to_vec(&index(vec![all]))?),
    ];
    files.extend(
        blobs.0.into_iter().map(|(digest, bytes)| Entry::new(format!("blobs/sha256/{digest}"), bytes)),
    );
    Ok(Image { archive: tar(files, true)?, digest })
}

/// How a container is started, and the labels: as in deploy/Containerfile.
fn config(revision: &str) -> Value {
    json!({
        "User": "0:0",
        "Entrypoint": [format!("/{BINARY}")],
        "Labels": {
            "org.opencontainers.image.title": "kube-proxy-ebpf",
            "org.opencontainers.image.description": "A Kubernetes service proxy with an eBPF data plane",
            "org.opencontainers.image.licenses": env!("CARGO_PKG_LICENSE"),
            "org.opencontainers.image.source": env!("CARGO_PKG_REPOSITORY"),
            "org.opencontainers.image.version": VERSION,
            "org.opencontainers.image.revision": revision,
        },
    })
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Read};

    use build_tools::command::workspace;

    use super::*;
    use crate::archive::tests::read;

    fn files(archive: impl Read) -> BTreeMap<String, (u32, Vec<u8>)> {
        read(archive).into_iter().collect()
    }

    /// The blob of a descriptor, of which digest and size are checked.
    fn blob<'a>(files: &'a BTreeMap<String, (u32, Vec<u8>)>, descriptor: &Value) -> &'a [u8] {
        let digest =
            descriptor["digest"].as_str().and_then(|it| it.strip_prefix("sha256:")).expect("a digest");
        let (_, bytes) = &files[&format!("blobs/sha256/{digest}")];
        assert_eq!(
            (sha256(bytes), bytes.len() as u64),
            (digest.to_owned(), descriptor["size"].as_u64().unwrap_or(0))
        );
        bytes
    }

    fn parse(bytes: &[u8]) -> Value {
        serde_json::from_slice(bytes).expect("JSON")
    }

    fn sample() -> Image {
        let binaries = Machine::ALL.map(|it| (it, format!("the binary of {}", it.name()).into_bytes()));
        image(&binaries, b"the license", "abc").expect("an image")
    }

    #[test]
    fn every_digest_and_size_is_that_of_its_blob_and_each_machine_has_its_binary() {
        let Image { archive, digest } = sample();
        let files_of_archive = files(&*archive);
        let top = parse(&files_of_archive["index.json"].1);
        assert_eq!(parse(&files_of_archive["oci-layout"].1)["imageLayoutVersion"], "1.0.0");
        let [all] = &top["manifests"].as_array().expect("a list")[..] else { panic!("one image: {top}") };
        assert_eq!(all["digest"], *digest);
        let mut count = 2;
        for (manifest, machine) in parse(blob(&files_of_archive, all))["manifests"]
            .as_array()
            .expect("a list")
            .iter()
            .zip(Machine::ALL)
        {
            assert_eq!(manifest["platform"], json!({ "architecture": machine.debian(), "os": "linux" }));
            let manifest = parse(blob(&files_of_archive, manifest));
            let config = parse(blob(&files_of_archive, &manifest["config"]));
            assert_eq!(config["architecture"], machine.debian());
            let [layer] = &manifest["layers"].as_array().expect("a list")[..] else { panic!("one layer") };
            let mut bytes = Vec::new();
            let layer = blob(&files_of_archive, layer);
            flate2::read::GzDecoder::new(layer).read_to_end(&mut bytes).expect("gzip");
            assert_eq!(config["rootfs"]["diff_ids"], json!([format!("sha256:{}", sha256(&bytes))]));
            let layer = files(&*bytes);
            let binary = format!("the binary of {}", machine.name()).into_bytes();
            assert_eq!(layer[BINARY], (0o755, binary));
            assert_eq!(layer[LICENSE], (0o644, b"the license".to_vec()));
            assert_eq!(layer.keys().filter(|it| !it.ends_with('/')).count(), 2);
            count += 3;
        }
        let blobs =
            files_of_archive.keys().filter(|it| it.starts_with("blobs/sha256/") && !it.ends_with('/'));
        assert_eq!(blobs.count() + 1, count, "every blob is used");
        assert_eq!(sample().archive, archive, "equal binaries make an equal archive");
    }

    #[test]
    fn the_image_is_started_as_that_of_the_containerfile() {
        let text = fs::read_to_string(workspace().join("deploy/Containerfile")).expect("the Containerfile");
        let config = config("abc");
        assert!(text.contains(&format!("\nENTRYPOINT {}\n", config["Entrypoint"])), "{config}");
        assert!(text.contains(&format!("\nUSER {}\n", config["User"].as_str().expect("a user"))), "{config}");
        for (label, value) in config["Labels"].as_object().expect("labels") {
            let value = match label.rsplit('.').next() {
                Some("version") => "${VERSION}",
                Some("revision") => "${REVISION}",
                _ => value.as_str().expect("a text"),
            };
            assert!(text.contains(&format!("{label}=\"{value}\"")), "{label}");
        }
        assert_eq!(
            text.matches("org.opencontainers.image.").count(),
            config["Labels"].as_object().map_or(0, serde_json::Map::len)
        );
        assert!(text.contains(&format!("\nARG VERSION={VERSION}\n")), "{VERSION} is not the default");
        for path in [BINARY, LICENSE] {
            assert!(text.contains(&format!(" /{path}\n")), "{path}");
        }
    }
}
