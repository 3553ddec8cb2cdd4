//! Reloading of certificates.

#![expect(clippy::unwrap_used, reason = "a failed helper fails the test")]

use std::{fs, os::unix::fs::symlink, path::Path, sync::Arc};

use proxy_contract::tls::{Reloader, TlsFile, TlsFiles};
use rcgen::{CertificateParams, CertifiedKey, KeyPair};

/// The value is the certificate itself.
type Certificate = Reloader<Vec<u8>>;

fn pair() -> CertifiedKey<KeyPair> {
    let key = KeyPair::generate().unwrap();
    let cert = CertificateParams::default().self_signed(&key).unwrap();
    CertifiedKey { cert, signing_key: key }
}

fn write(folder: &Path, pair: &CertifiedKey<KeyPair>) {
    fs::write(folder.join("tls.crt"), pair.cert.pem()).unwrap();
    fs::write(folder.join("tls.key"), pair.signing_key.serialize_pem()).unwrap();
    fs::write(folder.join("ca.crt"), pair.cert.pem()).unwrap();
}

fn files(folder: &Path) -> TlsFiles {
    TlsFiles {
        certificate: folder.join("tls.crt"),
        key: folder.join("tls.key"),
        authorities: folder.join("ca.crt"),
    }
}

fn reloader(folder: &Path) -> Result<Certificate, proxy_contract::tls::TlsError> {
    Reloader::new(files(folder), |it| Ok(it.chain[0].to_vec()))
}

#[test]
fn an_error_at_the_start_names_the_file() {
    let (folder, good, other) = (tempfile::tempdir().unwrap(), pair(), pair());
    let folder = folder.path();
    let pem = good.cert.pem();
    let half = &pem[..pem.len() / 2];
    let key = other.signing_key.serialize_pem();
    let cases = [
        ("tls.crt", None, TlsFile::Certificate, "No such file"),
        ("tls.crt", Some(""), TlsFile::Certificate, "contains no PEM certificate"),
        ("tls.crt", Some(half), TlsFile::Certificate, "invalid PEM"),
        ("tls.key", None, TlsFile::Key, "No such file"),
        ("tls.key", Some(&*pem), TlsFile::Key, "contains no PEM private key"),
        ("tls.key", Some(&*key), TlsFile::Key, "does not match the certificate in"),
        ("ca.crt", None, TlsFile::Authorities, "No such file"),
        ("ca.crt", Some("text"), TlsFile::Authorities, "contains no PEM certificate"),
    ];
    for (name, text, file, reason) in cases {
        write(folder, &good);
        match text {
            Some(text) => fs::write(folder.join(name), text).unwrap(),
            None => fs::remove_file(folder.join(name)).unwrap(),
        }
        let error = reloader(folder).unwrap_err();
        assert_eq!((error.file, &*error.path), (file, &*folder.join(name)), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    }
    write(folder, &good);
    assert_eq!(*reloader(folder).unwrap().current(), good.cert.der().to_vec());
}

#[test]
fn swapped_symlinks_are_followed() {
    let (folder, [first, second]) = (tempfile::tempdir().unwrap(), [pair(), pair()]);
    let folder = folder.path();
    // As kubelet writes a Secret: the files are links through `..data`, which is a link to a directory.
    for (name, pair) in [("..1", &first), ("..2", &second)] {
        fs::create_dir(folder.join(name)).unwrap();
        write(&folder.join(name), pair);
    }
    symlink("..1", folder.join("..data")).unwrap();
    for name in ["tls.crt", "tls.key", "ca.crt"] {
        symlink(Path::new("..data").join(name), folder.join(name)).unwrap();
    }
    let reloader = reloader(folder).unwrap();
    let before = reloader.current();
    assert!(Arc::ptr_eq(&before, &reloader.current()), "nothing is rebuilt while nothing changes");
    symlink("..2", folder.join("..data_tmp")).unwrap();
    fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
    assert_eq!(*reloader.current(), second.cert.der().to_vec());
    assert_eq!(*before, first.cert.der().to_vec());
}

#[test]
fn the_last_valid_set_stays_and_an_error_is_logged_once() {
    let (folder, [first, second]) = (tempfile::tempdir().unwrap(), [pair(), pair()]);
    let folder = folder.path();
    write(folder, &first);
    let reloader = reloader(folder).unwrap();
    let log = folder.join("log");
    // Other tests log to it too, about files in other folders.
    tracing_subscriber::fmt().with_writer(fs::File::create(&log).unwrap()).init();
    let count = |what: &str| {
        let text = fs::read_to_string(&log).unwrap();
        text.lines().filter(|it| it.contains(folder.to_str().unwrap()) && it.contains(what)).count()
    };
    let reload = |times| (0..times).for_each(|_| assert_eq!(*reloader.current(), first.cert.der().to_vec()));

    fs::write(folder.join("tls.key"), second.signing_key.serialize_pem()).unwrap();
    reload(3);
    assert_eq!((count("does not match the certificate"), count("stay in use")), (1, 1));
    fs::remove_file(folder.join("tls.crt")).unwrap();
    reload(3);
    assert_eq!((count("No such file"), count("stay in use")), (1, 2));
    // Restored: nothing to log. After that, the same error is a new one.
    write(folder, &first);
    reload(1);
    fs::remove_file(folder.join("tls.crt")).unwrap();
    reload(2);
    assert_eq!((count("No such file"), count("reloaded")), (2, 0));
    write(folder, &second);
    assert_eq!(*reloader.current(), second.cert.der().to_vec());
    assert_eq!(count("reloaded"), 1);
}
