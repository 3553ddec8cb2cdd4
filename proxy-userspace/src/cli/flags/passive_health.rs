//! Flags of passive health: when endpoints that fail are ejected.

use std::{num::NonZeroU8, time::Duration};

use clap::{Args, ValueEnum};
use datapath::PassiveHealthOptions;

use super::go_duration;
use crate::cli::output::wrong_usage;

/// When endpoints that fail are ejected, unless their Service says otherwise.
#[derive(Clone, Copy, Debug, Args)]
#[command(next_help_heading = "Passive health of endpoints")]
pub(super) struct PassiveHealthFlags {
    /// Eject endpoints that fail a client's connections: for a time they get no new ones of that client
    ///
    /// Each Service may say otherwise by the annotation kube-proxy-ebpf.io/passive-health.
    #[arg(long, value_name = "on|off", default_value = "on")]
    passive_health: Switch,
    /// Consecutive failures after which an endpoint is ejected for a client, 1 to 50
    #[arg(long, value_name = "NUMBER", default_value = "3", value_parser = up_to::<50>)]
    passive_health_failures: NonZeroU8,
    /// First ejection time, 1s to 1h; doubled by each consecutive ejection
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = up_to_hours::<1>)]
    passive_health_ejection_time: Duration,
    /// Longest ejection time, up to 24h; at least --passive-health-ejection-time
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = up_to_hours::<24>)]
    passive_health_max_ejection_time: Duration,
    /// Percentage of a set's endpoints that may be ejected, 1 to 100; the last endpoint never is
    #[arg(long, value_name = "NUMBER", default_value = "100", value_parser = up_to::<100>)]
    passive_health_max_ejected_percent: NonZeroU8,
}

/// The value of `--passive-health`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Switch {
    /// Eject endpoints that fail
    On,
    /// Do not
    Off,
}

impl PassiveHealthFlags {
    pub(super) fn options(self) -> anyhow::Result<PassiveHealthOptions> {
        if self.passive_health_max_ejection_time < self.passive_health_ejection_time {
            return Err(wrong_usage(format_args!(
                "--passive-health-max-ejection-time {:?} is shorter than --passive-health-ejection-time {:?}; use the same or a longer time, up to 24h",
                self.passive_health_max_ejection_time, self.passive_health_ejection_time
            )));
        }
        Ok(PassiveHealthOptions {
            enabled: self.passive_health == Switch::On,
            failures: self.passive_health_failures,
            max_ejected_percent: self.passive_health_max_ejected_percent,
            ejection_time: self.passive_health_ejection_time,
            max_ejection_time: self.passive_health_max_ejection_time,
        })
    }
}

fn up_to<const MAX: u8>(text: &str) -> Result<NonZeroU8, String> {
    let number = text.parse().ok().filter(|it: &NonZeroU8| it.get() <= MAX);
    number.ok_or_else(|| format!("use a number from 1 to {MAX}"))
}

/// A duration from a second to so many hours.
fn up_to_hours<const MAX: u64>(text: &str) -> Result<Duration, String> {
    let allowed = Duration::from_secs(1)..=Duration::from_secs(MAX * 3600);
    let duration = go_duration(text).filter(|it| allowed.contains(it));
    duration.ok_or_else(|| format!("use a duration from 1s to {MAX}h, such as 30s"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::tests::parse_flags;

    /// The options, or the error, for `--passive-health` with these words, such as `-failures=5`.
    fn options(words: &[&str]) -> Result<PassiveHealthOptions, String> {
        let words: Vec<_> = words.iter().map(|it| format!("--passive-health{it}")).collect();
        let flags = parse_flags::<PassiveHealthFlags>(&words);
        flags.map_err(anyhow::Error::from).and_then(PassiveHealthFlags::options).map_err(|it| it.to_string())
    }

    fn expect(enabled: bool, [failures, percent]: [u8; 2], [first, max]: [u64; 2]) -> PassiveHealthOptions {
        PassiveHealthOptions {
            enabled,
            failures: failures.try_into().unwrap(),
            max_ejected_percent: percent.try_into().unwrap(),
            ejection_time: Duration::from_secs(first),
            max_ejection_time: Duration::from_secs(max),
        }
    }

    #[test]
    fn every_flag_has_its_place_in_the_options() {
        assert_eq!(options(&[]), Ok(expect(true, [3, 100], [5, 60])));
        let words = ["=off", "-failures=7", "-max-ejected-percent=30", "-ejection-time=90s"];
        let all = words.into_iter().chain(["-max-ejection-time=1h30m"]).collect::<Vec<_>>();
        assert_eq!(options(&all), Ok(expect(false, [7, 30], [90, 5_400])));
        // The limits.
        let least = ["-failures=1", "-max-ejected-percent=1", "-ejection-time=1s", "-max-ejection-time=1s"];
        assert_eq!(options(&least), Ok(expect(true, [1, 1], [1, 1])));
        let most = ["-failures=50", "-ejection-time=1h", "-max-ejection-time=24h"];
        assert_eq!(options(&most), Ok(expect(true, [50, 100], [3_600, 86_400])));
    }

    #[test]
    fn an_absurd_value_is_refused_with_the_allowed_range() {
        for (words, range) in [
            (&["=maybe"][..], "[possible values: on, off]"),
            (&["-failures=0"], "from 1 to 50"),
            (&["-failures=51"], "from 1 to 50"),
            (&["-max-ejected-percent=101"], "from 1 to 100"),
            (&["-max-ejected-percent=50%"], "from 1 to 100"),
            (&["-ejection-time=0s"], "from 1s to 1h"),
            (&["-ejection-time=999ms"], "from 1s to 1h"),
            (&["-ejection-time=3601s"], "from 1s to 1h"),
            (&["-ejection-time=5"], "from 1s to 1h"),
            (&["-max-ejection-time=25h"], "from 1s to 24h"),
            (&["-max-ejection-time=-1s"], "from 1s to 24h"),
            (&["-max-ejection-time=4s"], "is shorter than --passive-health-ejection-time 5s"),
            (&["-ejection-time=2m"], "--passive-health-max-ejection-time 60s is shorter than"),
        ] {
            let error = options(words).unwrap_err();
            assert!(error.contains(range), "{words:?}: {error}");
        }
    }
}
