//! How long the programs of a service wait for a processor: the kernel's pressure stall information (PSI) about their
//! cgroups.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{fs, io};

use margay_core::name::Name;

use super::probe::Failure;
use super::processes;
use crate::agent::Agent;
use crate::agent::active::cgroup::Hierarchy;

/// It is there on every kernel that accounts for pressure.
const OF_THE_HOST: &str = "/proc/pressure/cpu";
/// In the directory of every cgroup but the root.
const FILE: &str = "cpu.pressure";
/// What is left of the weight changes in steps, in percent: each change is told to routers, and by them to clients.
const STEP_PERCENT: u32 = 10;

/// Whether this kernel accounts for the pressure on processors.
///
/// # Errors
///
/// It does not; the message says what to do.
pub fn check_kernel() -> Result<(), String> {
    check_at(Path::new(OF_THE_HOST))
}

fn check_at(of_the_host: &Path) -> Result<(), String> {
    match fs::read_to_string(of_the_host) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!(
            "this kernel does not tell the pressure on its processors ({}: {error}); boot it with psi=1, or let a \
             command say the load",
            of_the_host.display()
        )),
    }
}

/// How much of its weight the pressure on the processors leaves a service of this host: 10 to 100.
///
/// # Errors
///
/// The kernel does not tell it, or its programs have no cgroup of their own.
pub fn percent_left(agent: &Agent, name: &Name) -> Result<u32, Failure> {
    check_kernel().map_err(Failure::failed)?;
    let cgroups = cgroups(agent, name).map_err(Failure::failed)?;
    of_cgroups(&cgroups).map_err(Failure::failed)
}

/// What the cgroup under the highest pressure leaves.
fn of_cgroups(cgroups: &BTreeSet<PathBuf>) -> Result<u32, String> {
    let percents = cgroups.iter().map(|cgroup| of_file(&cgroup.join(FILE))).collect::<Result<Vec<_>, _>>()?;
    percents.into_iter().min().ok_or_else(|| "no program that serves it is found on this host".to_owned())
}

fn of_file(path: &Path) -> Result<u32, String> {
    let wrong = |why: String| format!("{}: {why}", path.display());
    let text = fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    let waited = waited_percent(&text).ok_or_else(|| wrong(format!("`{}` is no pressure", text.trim())))?;
    Ok(left(waited))
}

/// In how much of the last ten seconds a task has waited, in whole percent: of `some avg10=1.62 avg60=8.46 …`.
fn waited_percent(text: &str) -> Option<u32> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let average = some.split(' ').find_map(|word| word.strip_prefix("avg10="))?;
    let (whole, _) = average.split_once('.')?;
    whole.parse().ok().filter(|percent| *percent <= 100)
}

/// Pressure alone takes no service out: where all instances are under it, some must serve.
fn left(waited_percent: u32) -> u32 {
    let steps = (100 - waited_percent + STEP_PERCENT / 2) / STEP_PERCENT;
    steps.max(1) * STEP_PERCENT
}

/// The cgroups of the programs that serve a name.
fn cgroups(agent: &Agent, name: &Name) -> Result<BTreeSet<PathBuf>, String> {
    let (hierarchy, started) = agent.publishing.active.cgroups(name)?;
    if !started.is_empty() {
        return Ok(started.into_iter().collect());
    }
    let pids = processes::listening(&processes::listeners(agent, name));
    let cgroups = pids.into_iter().filter_map(|pid| own(&hierarchy, pid).transpose());
    cgroups.collect()
}

/// The cgroup of a process; `None`: it has ended.
fn own(hierarchy: &Hierarchy, pid: u32) -> Result<Option<PathBuf>, String> {
    let path = match hierarchy.of(pid) {
        Ok(path) => path,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(format!("the cgroup of process {pid} is not known: {error}")),
    };
    if path == hierarchy.root() {
        return Err(format!(
            "process {pid} is in no cgroup of its own, and the pressure of the whole host would be meant; start it as \
             a unit of systemd, or by `margay run`"
        ));
    }
    Ok(Some(path))
}

#[cfg(test)]
mod test {
    use super::*;

    fn text(average: &str) -> String {
        format!(
            "some avg10={average} avg60=8.46 avg300=13.08 total=18157268793\n\
             full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
        )
    }

    /// A directory as the kernel has it for a cgroup.
    fn cgroup(at: &Path, name: &str, content: &str) -> PathBuf {
        let path = at.join(name);
        fs::create_dir(&path).expect("made");
        fs::write(path.join(FILE), content).expect("written");
        path
    }

    #[test]
    fn the_share_of_the_last_ten_seconds_counts() {
        assert_eq!(waited_percent(&text("1.62")), Some(1));
        assert_eq!(waited_percent(&text("100.00")), Some(100));
        for wrong in ["", "some", "some avg10=x.0", "some avg10=101.00 avg60=0.00", "full avg10=5.00 avg60=0.00"] {
            assert_eq!(waited_percent(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn pressure_takes_steps_of_the_weight_and_never_all_of_it() {
        assert_eq!([0, 4, 6, 15, 42, 50, 95, 96, 100].map(left), [100, 100, 90, 90, 60, 50, 10, 10, 10]);
    }

    #[test]
    fn of_several_cgroups_the_one_that_waits_longest_counts() {
        let dir = tempfile::tempdir().expect("a directory");
        let calm = cgroup(dir.path(), "calm", &text("0.00"));
        let busy = cgroup(dir.path(), "busy", &text("61.30"));
        assert_eq!(of_cgroups(&[calm.clone()].into()), Ok(100));
        assert_eq!(of_cgroups(&[calm.clone(), busy].into()), Ok(40));
        let broken = cgroup(dir.path(), "broken", "nothing\n");
        let why = of_cgroups(&[calm, broken].into()).expect_err("no number");
        assert!(why.ends_with("broken/cpu.pressure: `nothing` is no pressure"), "{why}");
        let why = of_cgroups(&[dir.path().join("gone")].into()).expect_err("no file");
        assert!(why.contains("gone/cpu.pressure: No such file"), "{why}");
        assert!(of_cgroups(&BTreeSet::new()).expect_err("nobody").contains("no program that serves it"));
    }

    #[test]
    fn a_kernel_that_tells_no_pressure_is_named() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("cpu");
        let why = check_at(&file).expect_err("it is not there");
        assert!(why.contains("boot it with psi=1"), "{why}");
        fs::write(&file, text("0.00")).expect("written");
        assert_eq!(check_at(&file), Ok(()));
    }
}
