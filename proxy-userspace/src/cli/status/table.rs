//! What was seen, for people.
//! The one rule: what could not be read has its line, as what could.

use std::{collections::HashSet, fmt::Write as _};

use comfy_table::{Table, presets};
use datapath::{ActiveFrontend, PortCounts};
use datapath_ebpf::check;

use super::{Name, Seen};

const HEADER: [&str; 7] = ["SERVICE", "PORT", "ADDRESS", "ENDPOINTS", "CONNECTIONS", "REFUSED", ""];
/// How many endpoints a row names.
const MOST_NAMED: usize = 3;

// Writing to a string cannot fail.
impl Seen {
    /// How all stands, then a row for each frontend, then what is refused.
    pub(super) fn table(&self) -> String {
        let mut out = self.process.told();
        self.tell_kernel(&mut out);
        out.push('\n');
        for line in self.frontends().lines() {
            let _ = writeln!(out, "{}", line.trim());
        }
        if let Some(status) = &self.process.status
            && !status.rejected.is_empty()
        {
            out.push_str("\nREJECTED\n");
            for it in &status.rejected {
                let _ = writeln!(out, "{} ({}): {}", it.item, it.by, it.reason);
            }
        }
        out
    }

    /// How the kernel's part stands.
    fn tell_kernel(&self, out: &mut String) {
        let _ = match &self.generation {
            Ok(Some(generation)) => writeln!(out, "maps       generation {generation} in force"),
            Ok(None) => Ok(()),
            Err(error) => writeln!(out, "maps       cannot be read: {error}"),
        };
        if let Err(error) = &self.counts {
            let _ = writeln!(out, "counters   cannot be read: {error}");
        }
        let (Ok(packets) | Err(packets)) = &self.packets;
        let _ = writeln!(out, "programs   {}", self.programs());
        let _ = writeln!(out, "packets    {packets}");
        let _ = writeln!(out, "kernel     {}", check::kernel().says);
    }

    /// Where the programs are in effect.
    fn programs(&self) -> String {
        if self.are_packets_alone() {
            return "none: packets alone".into();
        }
        let hooks = match &self.hooks {
            Ok(hooks) => hooks,
            Err(error) => return format!("cannot be looked at: {error}"),
        };
        let missing: Vec<_> = hooks.missing().map(|it| it.name).collect();
        let cgroup = hooks.cgroup.display();
        let unreached = hooks.unreached.as_ref().map(|it| format!("; {it}")).unwrap_or_default();
        if missing.is_empty() {
            format!("in effect at all {} hooks of {cgroup}{unreached}", hooks.hooks.len())
        } else {
            format!("NOT in effect on {cgroup}: {}{unreached}", missing.join(", "))
        }
    }

    fn frontends(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING).set_header(HEADER);
        let mut told = HashSet::new();
        for (Name { service, port }, led) in self.rows() {
            let ActiveFrontend { frontend, backends, port: id, .. } = led;
            // They are the service port's: with the first of its addresses they are told.
            let (connections, no_backend) = match id.filter(|it| told.insert(*it)) {
                Some(id) if let Ok(counts) = &self.counts => {
                    let PortCounts { connections, no_backend, .. } = counts.of(id);
                    (connections.to_string(), no_backend.to_string())
                }
                _ => Default::default(),
            };
            let mut named: Vec<_> = backends.iter().take(MOST_NAMED).map(ToString::to_string).collect();
            if backends.len() > MOST_NAMED {
                named.push("…".into());
            }
            if backends.is_empty() {
                named.push("refused".into());
            }
            let service = if service.is_empty() { "?".into() } else { service };
            let endpoints = backends.len().to_string();
            table.add_row([
                service,
                port,
                frontend.clone(),
                endpoints,
                connections,
                no_backend,
                named.join(" "),
            ]);
        }
        table
    }
}
