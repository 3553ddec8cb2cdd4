//! Certificates in files, as they come and go.

#![expect(clippy::unwrap_used, reason = "what fails in a helper fails the test")]

use std::{
    fs, io,
    os::unix::fs::symlink,
    path::Path,
    sync::{Arc, Mutex},
};

use proxy_contract::tls::{Reloader, TlsFile, TlsFiles};
use rcgen::{CertificateParams, CertifiedKey, KeyPair};

/// What is made here: the certificate itself.
type Made = Reloader<Vec<u8>>;

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

fn made(folder: &Path) -> Result<Made, proxy_contract::tls::TlsError> {
    Reloader::new(files(folder), |it| Ok(it.chain[0].to_vec()))
}

#[test]
fn what_is_wrong_at_the_beginning_names_the_file() {
    let (folder, good, other) = (tempfile::tempdir().unwrap(), pair(), pair());
    let folder = folder.path();
    let pem = good.cert.pem();
    let half = &pem[..pem.len() / 2];
    let key = other.signing_key.serialize_pem();
    let cases = [
        ("tls.crt", None, TlsFile::Certificate, "No such file"),
        ("tls.crt", Some(""), TlsFile::Certificate, "there is no certificate in it"),
        ("tls.crt", Some(half), TlsFile::Certificate, "cannot be read as PEM"),
        ("tls.key", None, TlsFile::Key, "No such file"),
        ("tls.key", Some(&*pem), TlsFile::Key, "there is no private key in it"),
        ("tls.key", Some(&*key), TlsFile::Key, "it is not the key of the certificate in"),
        ("ca.crt", None, TlsFile::Authorities, "No such file"),
        ("ca.crt", Some("text"), TlsFile::Authorities, "there is no certificate in it"),
    ];
    for (name, text, part, reason) in cases {
        write(folder, &good);
        match text {
            Some(text) => fs::write(folder.join(name), text).unwrap(),
            None => fs::remove_file(folder.join(name)).unwrap(),
        }
        let error = made(folder).unwrap_err();
        assert_eq!((error.part, &*error.path), (part, &*folder.join(name)), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    }
    write(folder, &good);
    assert_eq!(*made(folder).unwrap().current(), good.cert.der().to_vec());
}

#[test]
fn links_that_are_swapped_are_followed() {
    let (folder, [first, second]) = (tempfile::tempdir().unwrap(), [pair(), pair()]);
    let folder = folder.path();
    // As kubelet writes a Secret: the files lead through a link to a folder of its own.
    for (name, pair) in [("..1", &first), ("..2", &second)] {
        fs::create_dir(folder.join(name)).unwrap();
        write(&folder.join(name), pair);
    }
    symlink("..1", folder.join("..data")).unwrap();
    for name in ["tls.crt", "tls.key", "ca.crt"] {
        symlink(Path::new("..data").join(name), folder.join(name)).unwrap();
    }
    let made = made(folder).unwrap();
    let before = made.current();
    assert!(Arc::ptr_eq(&before, &made.current()), "nothing is made anew while nothing changes");
    symlink("..2", folder.join("..data_tmp")).unwrap();
    fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
    assert_eq!(*made.current(), second.cert.der().to_vec());
    assert_eq!(*before, first.cert.der().to_vec());
}

/// A log to look at.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// How often something is said of the files in a folder.
    fn count(&self, folder: &Path, what: &str) -> usize {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        text.lines().filter(|it| it.contains(folder.to_str().unwrap()) && it.contains(what)).count()
    }
}

#[test]
fn the_last_good_set_stays_and_what_is_wrong_is_said_once() {
    let (folder, [first, second]) = (tempfile::tempdir().unwrap(), [pair(), pair()]);
    let folder = folder.path();
    write(folder, &first);
    let made = made(folder).unwrap();
    let log = Log::default();
    let writer = log.clone();
    // Other tests write into it, too.
    tracing_subscriber::fmt().with_writer(move || writer.clone()).init();
    let count = |what| log.count(folder, what);
    let look = |times| (0..times).for_each(|_| assert_eq!(*made.current(), first.cert.der().to_vec()));

    fs::write(folder.join("tls.key"), second.signing_key.serialize_pem()).unwrap();
    look(3);
    assert_eq!((count("it is not the key of"), count("stays in use")), (1, 1));
    fs::remove_file(folder.join("tls.crt")).unwrap();
    look(3);
    assert_eq!((count("No such file"), count("stays in use")), (1, 2));
    // As it was: nothing to say; then the same complaint is a new one.
    write(folder, &first);
    look(1);
    fs::remove_file(folder.join("tls.crt")).unwrap();
    look(2);
    assert_eq!((count("No such file"), count("read anew")), (2, 0));
    write(folder, &second);
    assert_eq!(*made.current(), second.cert.der().to_vec());
    assert_eq!(count("read anew"), 1);
}
