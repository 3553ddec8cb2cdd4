//! `--config`: a `KubeProxyConfiguration`, as a kubeadm cluster has it for kube-proxy.
//!
//! The one rule: every field is used, or said not to be, and why; flags and environment win over it.
//! What the file says becomes the default of the flag of the same meaning, so that it is read by the flag's own rules.
//! So does what follows from another flag.

mod fields;
mod file;

use std::{error::Error as _, ffi::OsString, fmt::Write as _, path::PathBuf};

use clap::{
    ArgMatches, Args, Command, CommandFactory as _, FromArgMatches as _,
    error::{ContextKind, ContextValue},
    parser::ValueSource,
};

use super::{Cli, packets};

pub(super) use file::{ConfigError, File};

/// A file with flags, for who looks at what was started by it.
#[derive(Clone, Debug, Args)]
pub(super) struct Given {
    /// A KubeProxyConfiguration (kubeproxy.config.k8s.io/v1alpha1), as kube-proxy reads it; flags and environment win over
    /// it
    ///
    /// Fields that are not needed here are named in the log, with the reason. With a file, the source of `run` and `brain`
    /// is kube if nothing else is said. `check` and `status` find what was started with a file by the same file.
    #[arg(long, value_name = "FILE", env = "KUBE_PROXY_EBPF_CONFIG")]
    config: Option<PathBuf>,
}

/// A file with flags, for who is started by it.
#[derive(Clone, Debug, Args)]
pub(super) struct ConfigFile {
    #[command(flatten)]
    _given: Given,
    /// Print what is in force and where it comes from (flag, environment, file or default), and end
    #[arg(long)]
    print_config: bool,
}

/// A command line, with what a file adds to it.
#[derive(Debug)]
pub(super) struct CommandLine {
    pub(super) cli: Cli,
    matches: ArgMatches,
    file: Option<File>,
    /// The cgroup that keeps packets from being translated unasked.
    bound: Option<PathBuf>,
}

/// Why there is no command line to act on.
#[derive(Debug)]
pub(super) enum Wrong {
    /// Flags that make no sense; or help, where that was asked for.
    Usage(clap::Error),
    /// The file.
    File(ConfigError),
}

impl From<clap::Error> for Wrong {
    fn from(error: clap::Error) -> Self {
        Self::Usage(error)
    }
}

impl CommandLine {
    /// Parses the words of a command line, and reads the file that they name.
    pub(super) fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Self, Wrong> {
        let words: Vec<_> = words.into_iter().collect();
        let mut command = Cli::command();
        let mut read = None;
        if let Some((name, path)) = named_file(&words) {
            let file = File::read(&path, known(&command, &name)).map_err(Wrong::File)?;
            command = with_defaults(command, &name, &file);
            read = Some((name, file));
        }
        let parse = |command: &Command| {
            command.clone().try_get_matches_from(&words).map_err(|error| match &read {
                Some((name, file)) => blamed(error, command, name, file),
                None => error.into(),
            })
        };
        let mut matches = parse(&command)?;
        let mut bound = None;
        if let Some((name, given)) = matches.subcommand()
            && let Some(cgroup) = packets::bound(given)
        {
            let name = name.to_owned();
            let off = |it: clap::Arg| it.default_value(packets::OFF);
            command = command.mut_subcommand(name, |it| it.mut_arg(packets::ID, off));
            matches = parse(&command)?;
            bound = Some(cgroup);
        }
        let cli = Cli::from_arg_matches(&matches)?;
        Ok(Self { cli, matches, file: read.map(|(_, file)| file), bound })
    }

    /// What should be said of the file, and of what follows from flags, line by line.
    pub(super) fn remarks(&self) -> impl Iterator<Item = String> {
        let packets = self.bound.iter().map(|it| {
            format!(
                "packets are left alone: --cgroup {} bounds sockets only, and packets would be translated for the whole \
                 network namespace; --packets nft has them translated",
                it.display()
            )
        });
        let all = self.file.iter().flat_map(File::remarks).map(str::to_owned).chain(packets);
        // Who only looks has nothing to say of what others do by it.
        let acts =
            self.matches.subcommand().is_some_and(|(_, it)| it.try_contains_id("print_config").is_ok());
        all.filter(move |_| acts)
    }

    /// Which fields of the file flags have their values from, each as `--flag` and as a person would look for it.
    pub(super) fn origins(&self) -> Vec<(String, String)> {
        let (Some(file), Some((name, matches))) = (&self.file, self.matches.subcommand()) else {
            return Vec::new();
        };
        let command = Cli::command();
        let from_file = file.defaults().filter_map(|(id, _)| {
            let is_default = matches.value_source(id) == Some(ValueSource::DefaultValue);
            let long = long(&command, name, id).filter(|_| is_default)?;
            Some((format!("--{long}"), format!("{}: {}", file.path().display(), file.field_of(id)?)))
        });
        from_file.collect()
    }

    /// What is in force and where it comes from, if that is what was asked for.
    pub(super) fn printed(&self) -> Option<String> {
        let (name, matches) = self.matches.subcommand()?;
        matches.try_get_one::<bool>("print_config").ok().flatten().filter(|it| **it)?;
        let mut command = Cli::command();
        command.build();
        let command = command.find_subcommand(name)?;
        let mut rows = Vec::new();
        for argument in command.get_arguments() {
            let id = argument.get_id().as_str();
            let Some(long) = argument.get_long() else { continue };
            if matches!(id, "help" | "version" | "config" | "print_config") {
                continue;
            }
            let values = matches.get_raw(id).into_iter().flatten();
            let values: Vec<_> = values.map(|it| it.to_string_lossy().into_owned()).collect();
            let field = self.file.as_ref().and_then(|it| it.field_of(id));
            let origin = match (matches.value_source(id), field) {
                (Some(ValueSource::CommandLine), _) => "flag".to_owned(),
                (Some(ValueSource::EnvVariable), _) => {
                    let variable = argument.get_env().unwrap_or_default().to_string_lossy();
                    format!("environment: {variable}")
                }
                (Some(_), Some(field)) => format!("file: {field}"),
                _ if id == packets::ID && self.bound.is_some() => "default below the root cgroup".to_owned(),
                _ => "default".to_owned(),
            };
            rows.push((format!("--{long}"), values.join(","), origin));
        }
        Some(aligned(&rows))
    }
}

fn aligned(rows: &[(String, String, String)]) -> String {
    let width = |column: fn(&(String, String, String)) -> &String| {
        rows.iter().map(|it| column(it).chars().count()).max().unwrap_or(0)
    };
    let (names, values) = (width(|it| &it.0), width(|it| &it.1));
    rows.iter().fold(String::new(), |mut text, (name, value, origin)| {
        writeln!(text, "{name:names$}  {value:values$}  {origin}").expect("a String takes it");
        text
    })
}

/// What is wrong with a command line that made sense without the file: one of the values that this has given.
fn blamed(error: clap::Error, command: &Command, name: &str, file: &File) -> Wrong {
    let said = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        Some(ContextValue::Strings(texts)) => Some(texts.join(", ")),
        _ => None,
    };
    let blamed = || {
        // As in `--cluster-cidr <CIDR,…>`.
        let flag = said(ContextKind::InvalidArg)?;
        let flag = flag.split_whitespace().next()?.strip_prefix("--")?;
        let (id, _) = file.defaults().find(|(id, _)| long(command, name, id) == Some(flag))?;
        let because = error.source().map(ToString::to_string);
        let reason =
            because.or_else(|| said(ContextKind::ValidValue).map(|it| format!("write one of {it}")))?;
        let (path, field) = (file.path().to_owned(), file.field_of(id)?.to_owned());
        Some(ConfigError::BadValue { path, field, value: said(ContextKind::InvalidValue)?, reason })
    };
    blamed().map_or_else(|| Wrong::Usage(error), Wrong::File)
}

/// What a flag of that id is called, of a subcommand or of all.
fn long<'a>(command: &'a Command, name: &str, id: &str) -> Option<&'a str> {
    let own = command.find_subcommand(name).into_iter().flat_map(Command::get_arguments);
    own.chain(command.get_arguments()).find(|it| it.get_id() == id)?.get_long()
}

/// The subcommand and the file that the words name, if they make sense at all.
fn named_file(words: &[OsString]) -> Option<(String, PathBuf)> {
    let mut command = Cli::command();
    let names: Vec<_> =
        command.get_subcommands().filter(|it| has(it, "config")).map(|it| it.get_name().to_owned()).collect();
    for name in &names {
        // What the file may say need not be said twice.
        command = command.mut_subcommand(name, |it| match has(&it, "source") {
            true => it.mut_arg("source", |it| it.required(false)),
            false => it,
        });
    }
    let matches = command.try_get_matches_from(words).ok()?;
    let (name, matches) = matches.subcommand()?;
    let path = matches.try_get_one::<PathBuf>("config").ok().flatten()?;
    // An environment variable that is there but empty says nothing.
    (!path.as_os_str().is_empty()).then(|| (name.to_owned(), path.clone()))
}

fn has(command: &Command, id: &str) -> bool {
    command.get_arguments().any(|it| it.get_id() == id)
}

/// Whether a flag of that id can be given to a subcommand.
fn known<'a>(command: &'a Command, name: &'a str) -> impl Fn(&str) -> bool + 'a {
    move |id| has(command, id) || command.find_subcommand(name).is_some_and(|it| has(it, id))
}

fn with_defaults(command: Command, name: &str, file: &File) -> Command {
    let (own, shared): (Vec<_>, Vec<_>) =
        file.defaults().partition(|(id, _)| command.find_subcommand(name).is_some_and(|it| has(it, id)));
    let set = |command: Command, defaults: Vec<(&'static str, &[String])>| {
        defaults.into_iter().fold(command, |command, (id, values)| {
            let values = values.to_vec();
            command.mut_arg(id, move |it| it.required(false).default_values(values))
        })
    };
    set(command, shared).mut_subcommand(name, |it| set(it, own))
}

#[cfg(test)]
mod tests;
