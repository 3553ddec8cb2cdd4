//! `--config`: a `KubeProxyConfiguration`, as kubeadm writes it for kube-proxy.
//!
//! Invariant: every field is used, or a remark names it with the reason; flags and environment override the file.
//! A value of the file becomes the default of the corresponding flag, and so is validated by the flag's own rules. The same
//! holds for a value that another flag implies.

use std::{env, error::Error as _, ffi::OsString, fs, future::pending, iter, path::PathBuf, time::Duration};

use anyhow::anyhow;
use clap::{
    Arg, ArgMatches, Args, Command,
    error::{ContextKind, ContextValue, ErrorKind},
    parser::ValueSource,
};
use comfy_table::Table;
use tokio::{task::spawn_blocking, time::sleep};

use super::{
    empty_values::without_empty,
    flags::{PACKETS, PACKETS_OFF, implied_off},
    output::lines,
};

pub(super) use kube_proxy_config::{ConfigError, File};

/// The ids of the flags that a brain does not take from the file: beside an agent, which reads the same file, these ports are the
/// agent's.
const PORTS_OF_THE_AGENT: [&str; 2] = ["healthz_bind_address", "metrics_bind_address"];

/// How often the file is compared with what was read.
const FILE_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// The file, for commands that inspect a process which was started with it.
#[derive(Clone, Debug, Args)]
pub(super) struct ConfigFlag {
    /// kube-proxy configuration file (KubeProxyConfiguration, kubeproxy.config.k8s.io/v1alpha1); flags and environment
    /// variables override it
    ///
    /// The log names the fields that are not needed here, with the reason. With a file, the default source is kube.
    /// When its content changes, `run`, `brain` and `agent` end, as kube-proxy does, to be started again with it.
    /// `check` and `status` take the file that `run` or `agent` was started with.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// The file, for commands that are started with it.
#[derive(Clone, Debug, Args)]
pub(super) struct ConfigFile {
    #[command(flatten)]
    _file: ConfigFlag,
    /// Print the value of every flag and its origin (flag, environment, file or default), and exit
    #[arg(long)]
    print_config: bool,
}

/// A parsed command line, with what the file adds to it.
#[derive(Debug)]
pub(super) struct CommandLine {
    /// The command without the file's defaults.
    command: Command,
    pub(super) matches: ArgMatches,
    file: Option<File>,
    /// The `--cgroup` that disables the nftables path.
    packets_off: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(super) enum ParseError {
    /// Invalid flags, or a request for help.
    Usage(#[from] clap::Error),
    File(ConfigError),
}

impl CommandLine {
    /// Parses the words of a command line, and reads the file that they name.
    pub(super) fn parse(
        original: Command,
        words: impl IntoIterator<Item = OsString>,
    ) -> Result<Self, ParseError> {
        let words = without_empty(words);
        let mut command = original.clone();
        let mut read = None;
        if let Some((name, path)) = named_file(&command, &words) {
            let file = File::read(&path, is_flag_of(&command, &name)).map_err(ParseError::File)?;
            command = with_defaults(command, &name, &file);
            read = Some((name, file));
        }
        let parse = |command: &Command| {
            command.clone().try_get_matches_from(&words).map_err(|error| match &read {
                Some((name, file)) => with_origin(error, command, name, file),
                None => of_kube_proxy(error).into(),
            })
        };
        let mut matches = parse(&command)?;
        let mut packets_off = None;
        if let Some((name, given)) = matches.subcommand()
            && let Some(cgroup) = implied_off(given)
        {
            let name = name.to_owned();
            let off = |it: Arg| it.default_value(PACKETS_OFF);
            command = command.mut_subcommand(name, |it| it.mut_arg(PACKETS, off));
            matches = parse(&command)?;
            packets_off = Some(cgroup);
        }
        Ok(Self { command: original, matches, file: read.map(|(_, file)| file), packets_off })
    }

    /// What to log about the file and about implied values; nothing for commands that only inspect.
    pub(super) fn remarks(&self) -> impl Iterator<Item = String> {
        let packets = self.packets_off.iter().map(|it| {
            format!(
                "the nftables path is off, because --cgroup {} is not the root cgroup and nftables would translate the \
                 packets of the whole network namespace; --packets nft enables it",
                it.display()
            )
        });
        let all = self.file.iter().flat_map(|it| &it.remarks).cloned().chain(packets);
        let serves = self.serves();
        all.filter(move |_| serves)
    }

    /// Whether the command is one that serves, `run`, `brain` or `agent`.
    pub(super) fn serves(&self) -> bool {
        self.matches.subcommand().is_some_and(|(_, it)| it.try_contains_id("print_config").is_ok())
    }

    /// The flags that have their value from the file, each as `--flag`, with file and field.
    pub(super) fn origins(&self) -> Vec<(String, String)> {
        let (Some(file), Some((name, matches))) = (&self.file, self.matches.subcommand()) else {
            return Vec::new();
        };
        let from_file = file.defaults().filter_map(|(id, _)| {
            let is_default = matches.value_source(id) == Some(ValueSource::DefaultValue);
            let long = long(&self.command, name, id).filter(|_| is_default)?;
            Some((format!("--{long}"), format!("{}: {}", file.path.display(), file.field_of(id)?)))
        });
        from_file.collect()
    }

    /// The value of every flag and its origin, if `--print-config` asks for them.
    pub(super) fn printed(&self) -> Option<String> {
        let (_, matches) = self.matches.subcommand()?;
        matches.try_get_one::<bool>("print_config").ok().flatten().filter(|it| **it)?;
        Some(self.flag_table())
    }

    /// What a command that serves is configured with.
    pub(super) fn configuration(&self) -> Configuration {
        let file = self.file.as_ref().map(|it| (it.path.clone(), it.text.clone()));
        let values = self.flag_values();
        let value_of = |id: &str| values.iter().find(|it| it.id == id).map(|it| it.value.as_str());
        let fields = kube_proxy_config::document(value_of);
        let flags = values.iter().map(|it| (it.long.clone(), it.value.clone())).collect();
        let pages = admin::Configuration { table: self.flag_table(), flags, fields };
        Configuration { command: self.command.clone(), pages, file }
    }

    /// The value of every flag and its origin.
    fn flag_table(&self) -> String {
        let mut table = Table::new();
        for FlagValue { long, value, origin, .. } in self.flag_values() {
            table.add_row([format!("--{long}"), value, origin]);
        }
        lines(&mut table)
    }

    /// The command and the flags whose values are no defaults, as in `run --source=kube`.
    pub(super) fn changed_flags(&self) -> String {
        let name = self.matches.subcommand_name().unwrap_or_default().to_owned();
        let flags = self.flag_values().into_iter().filter(|it| it.origin != DEFAULT);
        iter::once(name)
            .chain(flags.map(|it| format!("--{}={}", it.long, it.value)))
            .collect::<Vec<_>>()
            .join(" ")
    }

    fn flag_values(&self) -> Vec<FlagValue> {
        let Some((name, matches)) = self.matches.subcommand() else { return Vec::new() };
        // Global flags are added to subcommands when the command is built.
        let mut command = self.command.clone();
        command.build();
        let arguments = command.find_subcommand(name).into_iter().flat_map(Command::get_arguments);
        let value = |argument: &Arg| {
            let id = argument.get_id().as_str();
            let long = argument.get_long()?.to_owned();
            if matches!(id, "help" | "version" | "config" | "print_config") {
                return None;
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
                _ if id == PACKETS && self.packets_off.is_some() => {
                    "default below the root cgroup".to_owned()
                }
                _ => DEFAULT.to_owned(),
            };
            Some(FlagValue { id: id.to_owned(), long, value: values.join(","), origin })
        };
        arguments.filter_map(value).collect()
    }
}

/// What a command that serves was started with.
pub(super) struct Configuration {
    command: Command,
    /// What pages show of it.
    pub(super) pages: admin::Configuration,
    /// The file and its content.
    file: Option<(PathBuf, String)>,
}

impl Configuration {
    /// Waits until the file has other content, and returns the reason to end: as kube-proxy does, the process is started again
    /// with it. Content that it could not be started with is reported, and changes nothing. Cancel safe.
    pub(super) async fn changed(&self) -> anyhow::Error {
        let Some((path, started_with)) = &self.file else { return pending().await };
        let mut newest = started_with.clone();
        loop {
            sleep(FILE_CHECK_INTERVAL).await;
            let read = spawn_blocking({
                let path = path.clone();
                move || fs::read_to_string(path)
            });
            // A file that cannot be read is being replaced; in a pod, it is behind a link that is.
            let Ok(Ok(text)) = read.await else { continue };
            if text == newest {
                continue;
            }
            newest = text;
            if newest == *started_with {
                continue;
            }
            match CommandLine::parse(self.command.clone(), env::args_os()) {
                Ok(_) => {
                    return anyhow!("{}: the content was changed, a new start will use it", path.display());
                }
                Err(error) => tracing::error!("the changed file cannot be used, and is ignored: {error}"),
            }
        }
    }
}

/// The origin of a value that is neither given nor implied.
const DEFAULT: &str = "default";

/// A flag of a command, its value and where that comes from.
struct FlagValue {
    id: String,
    long: String,
    value: String,
    origin: String,
}

/// Turns an error about a value of the file into an error that names the field.
fn with_origin(error: clap::Error, command: &Command, name: &str, file: &File) -> ParseError {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        Some(ContextValue::Strings(texts)) => Some(texts.join(", ")),
        _ => None,
    };
    let bad_value = || {
        // As in `--cluster-cidr <CIDR,…>`.
        let flag = context(ContextKind::InvalidArg)?;
        let flag = flag.split_whitespace().next()?.strip_prefix("--")?;
        let (id, _) = file.defaults().find(|(id, _)| long(command, name, id) == Some(flag))?;
        let cause = error.source().map(ToString::to_string);
        let reason =
            cause.or_else(|| context(ContextKind::ValidValue).map(|it| format!("use one of {it}")))?;
        let (field, value) = (file.field_of(id)?, context(ContextKind::InvalidValue)?);
        let reason = format!("{field}: {value:?} cannot be used: {reason}");
        Some(ConfigError { path: file.path.clone(), reason })
    };
    bad_value().map_or_else(|| ParseError::Usage(of_kube_proxy(error)), ParseError::File)
}

/// Says of a flag of kube-proxy why the command does not take it, instead of naming a similar flag.
fn of_kube_proxy(mut error: clap::Error) -> clap::Error {
    if let (ErrorKind::UnknownArgument, Some(ContextValue::String(flag))) =
        (error.kind(), error.get(ContextKind::InvalidArg))
        && let Some(reason) = flag.strip_prefix("--").and_then(kube_proxy_config::reason)
    {
        let text = format!("kube-proxy's {flag} is not a flag of this command: {reason}");
        error.remove(ContextKind::SuggestedArg);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![text.into()]));
    }
    error
}

/// The long name of the flag with this id, of a subcommand or of all.
fn long<'a>(command: &'a Command, name: &str, id: &str) -> Option<&'a str> {
    let own = command.find_subcommand(name).into_iter().flat_map(Command::get_arguments);
    own.chain(command.get_arguments()).find(|it| it.get_id() == id)?.get_long()
}

/// The subcommand and the file that the words name; `None` if they cannot be parsed even without the file's values.
fn named_file(command: &Command, words: &[OsString]) -> Option<(String, PathBuf)> {
    let mut command = command.clone();
    let names: Vec<_> = command
        .get_subcommands()
        .filter(|it| has(it, "config") && has(it, "source"))
        .map(|it| it.get_name().to_owned())
        .collect();
    for name in &names {
        // The file may provide it.
        command = command.mut_subcommand(name, |it| it.mut_arg("source", |it| it.required(false)));
    }
    let matches = command.try_get_matches_from(words).ok()?;
    let (name, matches) = matches.subcommand()?;
    let path = matches.try_get_one::<PathBuf>("config").ok().flatten()?;
    // An environment variable that is set but empty counts as not set.
    (!path.as_os_str().is_empty()).then(|| (name.to_owned(), path.clone()))
}

fn has(command: &Command, id: &str) -> bool {
    command.get_arguments().any(|it| it.get_id() == id)
}

/// Whether a subcommand takes the flag with an id from the file.
fn is_flag_of<'a>(command: &'a Command, name: &'a str) -> impl Fn(&str) -> bool + 'a {
    let is_agents = move |id: &str| name == "brain" && PORTS_OF_THE_AGENT.contains(&id);
    move |id| {
        has(command, id) || command.find_subcommand(name).is_some_and(|it| has(it, id) && !is_agents(id))
    }
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
