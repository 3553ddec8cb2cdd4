//! Completions for shells, and man pages, from the flags. `cargo xtask completions` and `dist` have this test write them: the
//! binary does not contain what generates them.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
};

use clap::Command;
use clap_complete::Shell;

use super::command;

const NAME: &str = "kube-proxy-ebpf";
/// The environment variable with the folder into which they are written.
const FOLDER: &str = "KUBE_PROXY_EBPF_SHELL_FILES";

fn generate(folder: &Path) {
    let all = command();
    // What this program starts itself is nothing to complete.
    let commands = all.get_subcommands().filter(|it| !it.is_hide_set()).cloned();
    let about = all.get_about().unwrap().clone();
    let mut visible = Command::new(NAME).version(admin::VERSION).about(about).subcommands(commands);
    visible = visible.args(all.get_arguments().cloned());
    let [completions, man] = ["completions", "man"].map(|it| folder.join(it));
    for it in [&completions, &man] {
        fs::create_dir_all(it).unwrap();
    }
    for shell in [Shell::Bash, Shell::Fish, Shell::Zsh] {
        clap_complete::generate_to(shell, &mut visible.clone(), NAME, &completions).unwrap();
    }
    clap_mangen::generate_to(visible, man).unwrap();
}

fn read(folder: &Path) -> BTreeMap<String, String> {
    let files = ["completions", "man"].map(|it| fs::read_dir(folder.join(it)).unwrap());
    let read = |it: PathBuf| {
        let name = it.file_name().unwrap().to_string_lossy().into_owned();
        (name, fs::read_to_string(it).unwrap())
    };
    files.into_iter().flatten().map(|it| read(it.unwrap().path())).collect()
}

#[test]
fn every_command_and_flag_is_completed_and_has_a_man_page() {
    let folder = tempfile::tempdir().unwrap();
    let folder = env::var_os(FOLDER).map_or_else(|| folder.path().to_owned(), PathBuf::from);
    generate(&folder);
    let files = read(&folder);
    let completions = ["kube-proxy-ebpf.bash", "kube-proxy-ebpf.fish", "_kube-proxy-ebpf"];
    for subcommand in command().get_subcommands() {
        let page = files.get(&format!("{NAME}-{}.1", subcommand.get_name()));
        let completed = files[completions[0]].contains(&format!(",{})", subcommand.get_name()));
        assert_eq!([page.is_some(), completed], [!subcommand.is_hide_set(); 2], "{}", subcommand.get_name());
        let Some(page) = page else { continue };
        for flag in subcommand.get_arguments().filter(|it| !it.is_hide_set()) {
            let Some(long) = flag.get_long() else { continue };
            for completion in completions {
                assert!(files[completion].contains(long), "{completion} has no --{long}");
            }
            // In roff, a dash is escaped.
            assert!(page.contains(&long.replace('-', "\\-")), "{page} has no --{long}");
        }
    }
}
