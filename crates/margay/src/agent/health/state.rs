//! Whether a service is well, from the results of its checks. Pure: times are passed in, as durations since one moment
//! that the caller has chosen.

use std::time::Duration;

/// The weight grows back in so many steps.
const STEPS: u32 = 10;
const STEP_PERCENT: u32 = 100 / STEPS;

/// When a service becomes sick, and well again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Successes in a row that a sick service needs.
    pub rise: u32,
    /// Failures in a row that make a service sick.
    pub fall: u32,
    /// How long its weight takes to grow back.
    pub slow_start: Duration,
}

/// How it stands with a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It has its whole weight.
    Well,
    /// It has no weight.
    Sick,
    /// It is well again, and its weight grows.
    Growing,
}

/// What a check, or time, has brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// A check has succeeded, and `rise` in a row have not.
    Succeeded,
    /// `rise` checks in a row have succeeded.
    Risen,
    /// A check has failed, and `fall` in a row have not.
    Failed,
    /// `fall` checks in a row have failed.
    Fallen,
    /// The weight has grown to all of it.
    Grown,
}

/// All transitions. Other events leave the phase as it is.
const TRANSITIONS: [(Phase, Event, Phase); 4] = [
    (Phase::Well, Event::Fallen, Phase::Sick),
    (Phase::Sick, Event::Risen, Phase::Growing),
    (Phase::Growing, Event::Fallen, Phase::Sick),
    (Phase::Growing, Event::Grown, Phase::Well),
];

fn next(phase: Phase, event: Event) -> Phase {
    let found = TRANSITIONS.iter().find(|(from, by, _)| (*from, *by) == (phase, event));
    found.map_or(phase, |(_, _, to)| *to)
}

/// One service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    bounds: Bounds,
    phase: Phase,
    /// Since when it is in that phase.
    since: Duration,
    /// Whether the last check succeeded.
    has_succeeded: bool,
    /// Checks with that result in a row.
    streak: u32,
}

impl Machine {
    /// A service of which no check is known. It is well until checks fail, unless it was sick before.
    pub fn new(bounds: Bounds, is_sick: bool) -> Self {
        let phase = if is_sick { Phase::Sick } else { Phase::Well };
        Self { bounds, phase, since: Duration::ZERO, has_succeeded: false, streak: 0 }
    }

    /// How it stands.
    pub const fn phase(&self) -> Phase {
        self.phase
    }

    /// Takes the result of a check.
    pub fn observe(&mut self, has_succeeded: bool, now: Duration) {
        self.streak = if self.has_succeeded == has_succeeded { self.streak.saturating_add(1) } else { 1 };
        self.has_succeeded = has_succeeded;
        let event = match has_succeeded {
            true if self.streak >= self.bounds.rise => Event::Risen,
            true => Event::Succeeded,
            false if self.streak >= self.bounds.fall => Event::Fallen,
            false => Event::Failed,
        };
        self.enter(next(self.phase, event), now);
        self.grow(now);
    }

    /// Takes note of the time.
    pub fn grow(&mut self, now: Duration) {
        if self.steps(now) >= STEPS {
            self.enter(next(self.phase, Event::Grown), now);
        }
    }

    fn enter(&mut self, phase: Phase, now: Duration) {
        if phase != self.phase {
            self.phase = phase;
            self.since = now;
        }
    }

    /// Steps that are over, of [`STEPS`].
    fn steps(&self, now: Duration) -> u32 {
        let elapsed = now.saturating_sub(self.since);
        let is_over = |step: &u32| elapsed >= self.bounds.slow_start * *step / STEPS;
        (1..=STEPS).take_while(is_over).last().unwrap_or(0)
    }

    /// What is left of the weight: 0 to 100.
    pub fn percent(&self, now: Duration) -> u32 {
        match self.phase {
            Phase::Well => 100,
            Phase::Sick => 0,
            Phase::Growing => ((self.steps(now) + 1) * STEP_PERCENT).min(100),
        }
    }

    /// When the weight grows next.
    pub fn next_step(&self, now: Duration) -> Option<Duration> {
        let at = self.since + self.bounds.slow_start * (self.steps(now) + 1) / STEPS;
        (self.phase == Phase::Growing).then_some(at)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const PHASES: [Phase; 3] = [Phase::Well, Phase::Sick, Phase::Growing];
    const EVENTS: [Event; 5] = [Event::Succeeded, Event::Risen, Event::Failed, Event::Fallen, Event::Grown];

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn machine(slow_start: Duration) -> Machine {
        Machine::new(Bounds { rise: 2, fall: 3, slow_start }, false)
    }

    /// Takes results, one each second; gives the phases.
    fn phases(machine: &mut Machine, results: &[bool], begin: u64) -> Vec<Phase> {
        let observe = |(at, result): (u64, &bool)| {
            machine.observe(*result, s(at));
            machine.phase()
        };
        (begin..).zip(results).map(observe).collect()
    }

    #[test]
    fn the_whole_matrix() {
        let mut matrix = String::new();
        for phase in PHASES {
            let row: Vec<String> = EVENTS.iter().map(|event| format!("{:?}", next(phase, *event))).collect();
            matrix.push_str(&format!("{phase:?}: {}\n", row.join(" ")));
        }
        // Succeeded, Risen, Failed, Fallen, Grown.
        assert_eq!(
            matrix,
            "Well: Well Well Well Sick Well\nSick: Sick Growing Sick Sick Sick\nGrowing: Growing Growing Growing Sick \
             Well\n"
        );
    }

    #[test]
    fn results_count_in_a_row() {
        use Phase::{Sick, Well};
        let mut machine = machine(Duration::ZERO);
        let seen = phases(&mut machine, &[false, false, true, false, false, false], 1);
        assert_eq!(seen, [Well, Well, Well, Well, Well, Sick]);
        let seen = phases(&mut machine, &[true, false, true, true], 7);
        assert_eq!(seen, [Sick, Sick, Sick, Well], "without a slow start the whole weight is back at once");
        assert_eq!((machine.percent(s(10)), machine.next_step(s(10))), (100, None));
    }

    #[test]
    fn a_first_result_is_one_whatever_it_is() {
        let mut one = Machine::new(Bounds { rise: 1, fall: 1, slow_start: Duration::ZERO }, false);
        one.observe(false, s(1));
        assert_eq!(one.phase(), Phase::Sick);
        one.observe(true, s(2));
        assert_eq!(one.phase(), Phase::Well);
    }

    #[test]
    fn who_was_sick_before_stays_so_until_checks_succeed() {
        let mut machine = Machine::new(Bounds { rise: 2, fall: 3, slow_start: Duration::ZERO }, true);
        assert_eq!(machine.percent(s(0)), 0);
        assert_eq!(phases(&mut machine, &[true, true], 1), [Phase::Sick, Phase::Well]);
    }

    #[test]
    fn the_weight_grows_in_steps_and_falls_at_once() {
        let mut machine = machine(s(100));
        phases(&mut machine, &[false, false, false], 1);
        assert_eq!(machine.percent(s(3)), 0);
        phases(&mut machine, &[true, true], 4);
        assert_eq!(machine.phase(), Phase::Growing);
        let percent: Vec<u32> = [5, 14, 15, 55, 95, 104].map(|at| machine.percent(s(at))).into();
        assert_eq!(percent, [10, 10, 20, 60, 100, 100]);
        assert_eq!((machine.next_step(s(5)), machine.next_step(s(16))), (Some(s(15)), Some(s(25))));
        machine.grow(s(104));
        assert_eq!(machine.phase(), Phase::Growing);
        machine.grow(s(105));
        assert_eq!((machine.phase(), machine.next_step(s(105))), (Phase::Well, None));

        phases(&mut machine, &[false, false, false, true, true], 200);
        assert_eq!(machine.phase(), Phase::Growing);
        assert_eq!(phases(&mut machine, &[false, false, false], 210)[2], Phase::Sick);
        assert_eq!((machine.percent(s(300)), machine.next_step(s(300))), (0, None));
    }
}
