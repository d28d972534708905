//! A program under the shim, which sees when it can leave between two connections.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use miette::{Result, miette};

const FILE: &str = "libmargay-preload.so";
/// Where libraries are installed, beside the program's own prefix.
const PLACES: [&str; 2] = ["/usr/local/lib", "/usr/lib"];

/// The shim of this release: beside the program as it was built, in its prefix, or where libraries are installed.
pub fn shim() -> Result<PathBuf> {
    let program = env::current_exe().unwrap_or_default();
    let dir = program.parent().unwrap_or_else(|| Path::new("/"));
    let own = [dir.join(FILE), dir.join("../lib").join(FILE)];
    let installed = PLACES.iter().map(|place| Path::new(place).join(FILE));
    own.into_iter().chain(installed).find(|path| path.is_file()).ok_or_else(|| {
        miette!(
            help = "install the C library that came with this program (`make install`)",
            "--splice needs {FILE}, which is neither beside this program nor in {}; nothing is served",
            PLACES.join(" or ")
        )
    })
}

/// Has the program run under the shim, before other libraries that are loaded so. `when`: it leaves no connection until
/// there is this file.
pub fn watch(command: &mut Command, shim: &Path, ports: &[u16], when: Option<&Path>) {
    let mut libraries = OsString::from(shim);
    if let Some(others) = env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        libraries.push(":");
        libraries.push(others);
    }
    let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
    command.env("LD_PRELOAD", libraries).env("MARGAY_SPLICE_PORTS", ports.join(","));
    if let Some(when) = when {
        command.env("MARGAY_SPLICE_WHEN", when);
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_program_has_the_shim_and_the_ports() {
        let mut command = Command::new("haproxy");
        watch(&mut command, Path::new("/usr/lib/libmargay-preload.so"), &[80, 8443], Some(Path::new("/run/go")));
        let of = |name: &str| {
            let found = command.get_envs().find(|(known, _)| *known == name).and_then(|(_, value)| value);
            found.map(|value| value.to_string_lossy().into_owned()).unwrap_or_default()
        };
        assert_eq!(of("MARGAY_SPLICE_PORTS"), "80,8443");
        assert_eq!(of("MARGAY_SPLICE_WHEN"), "/run/go");
        assert_eq!(of("LD_PRELOAD").split(':').next(), Some("/usr/lib/libmargay-preload.so"));
    }
}
