//! Programs behind flows, for rules that are about them. The agent finds them, as the kernel tells, and not for
//! nothing: so it is asked only for flows that such a rule is about, and once they are known not again.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;

use margay_wire::FlowId;

use crate::machine::sal::Sal;
use crate::types::tuple::Tuple;

/// A program that is not found is looked for so often: its socket may be a moment younger than the flow.
const LOOKS_MAX: u8 = 5;
/// Bytes of each text; a longer one is left out.
const TEXT_MAX: usize = 4096;

/// A program at this end of a flow; what the kernel does not tell is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    /// Its file, with its path.
    pub executable: Option<String>,
    /// The unit of systemd that it is in.
    pub unit: Option<String>,
    /// The user as whom it runs.
    pub user: Option<String>,
}

/// What is known of the programs of flows that rules ask for.
#[derive(Debug, Default)]
pub(super) struct Programs(BTreeMap<FlowId, Sought>);

#[derive(Debug, Default)]
struct Sought {
    found: Option<Program>,
    looks: u8,
}

impl Programs {
    /// The program of a flow, where it is known.
    pub fn of(&self, id: FlowId) -> Option<&Program> {
        self.0.get(&id)?.found.as_ref()
    }

    /// A rule wants to know the program of a flow.
    pub fn ask(&mut self, id: FlowId) {
        self.0.entry(id).or_default();
    }

    pub fn forget(&mut self, id: FlowId) {
        self.0.remove(&id);
    }
}

impl Sal {
    /// Flows whose programs rules want to know, and that are not known yet: and what their sockets' packets carry.
    pub fn flows_to_identify(&self) -> Vec<(FlowId, Tuple)> {
        let sought = self.stack_rules.programs.0.iter().filter(|(_, one)| one.found.is_none() && one.looks < LOOKS_MAX);
        sought.filter_map(|(id, _)| Some((*id, self.flows.get(*id)?.app))).collect()
    }

    /// The program at this end of a flow; `None` where there was none to be found this time.
    pub fn note_program(&mut self, id: FlowId, program: Option<Program>) {
        let Some(sought) = self.stack_rules.programs.0.get_mut(&id) else { return };
        sought.looks = sought.looks.saturating_add(1);
        let Some(program) = program else { return };
        let bounded = |text: Option<String>| text.filter(|text| text.len() <= TEXT_MAX);
        let Program { executable, unit, user } = program;
        sought.found = Some(Program { executable: bounded(executable), unit: bounded(unit), user: bounded(user) });
        // What is known now may decide a condition.
        self.stack_rules.note_moved(id);
    }
}
