//! Repairs of what goes by one place of a striped flow (docs/decisions/0095), as they are on the wire. Datagrams go by
//! the place as by any other; what is repaired is what was on the wire, sealed where that was.

use margay_core::DropReason;
use margay_core::loss::Loss;
use margay_core::time::Instant;
use margay_stack::beside::CHECK_LEN;
use margay_stack::{Refused, Repair, RepairBeside, Repairer, Restorer};
use margay_wire::{
    COVERED_LEN_MAX, ChunkName, Covered, DATA_HEADER_LEN, DataRepr, FlowId, REPAIR, STACK_FEC, SYMBOL_HEAD_LEN,
};

use crate::train::Run;
use crate::udp::{SEGMENTS_MAX, SEND_MAX};

/// By so many bytes a datagram of such a place is shorter than the path allows: a repair is longer than the datagrams
/// of its block, of an even length, and goes the same way.
pub(crate) const REPAIR_MORE: u16 = (DATA_HEADER_LEN + COVERED_LEN_MAX + SYMBOL_HEAD_LEN + CHECK_LEN + 1) as u16;

/// Repairs for one send: all have the same length.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Repairs {
    pub datagrams: Vec<u8>,
    pub segment: usize,
}

/// The sending end of one place.
#[derive(Debug, Default)]
pub(crate) struct Repairing {
    repairer: Repairer,
    /// What the headers of repairs name: as those of the datagrams.
    peer_flow: FlowId,
}

fn name_of(header: &DataRepr) -> ChunkName {
    ChunkName { number: header.packet_number, index: header.index }
}

/// Writes a repair behind the others.
fn write(all: &mut Vec<Repairs>, peer_flow: FlowId, covered: &Covered, repair: &Repair<'_>) {
    let Repair { base, index, count, symbol, .. } = *repair;
    let header = DataRepr { stack: STACK_FEC, flags: REPAIR, dst_flow: peer_flow, packet_number: base, index, count };
    let mut names = [0; COVERED_LEN_MAX];
    let names_len = covered.emit(&mut names);
    let segment = DATA_HEADER_LEN + names_len + symbol.len();
    let fits = |one: &&mut Repairs| {
        let len = one.datagrams.len();
        one.segment == segment && len + segment <= SEND_MAX && len / segment < SEGMENTS_MAX
    };
    if all.last_mut().filter(fits).is_none() {
        all.push(Repairs { datagrams: Vec::new(), segment });
    }
    let Some(Repairs { datagrams, .. }) = all.last_mut() else { return };
    let at = datagrams.len();
    datagrams.resize(at + DATA_HEADER_LEN, 0);
    header.emit(&mut datagrams[at..]);
    datagrams.extend_from_slice(&names[..names_len]);
    datagrams.extend_from_slice(symbol);
}

impl Repairing {
    /// Takes note of what the place loses.
    pub fn note_loss(&mut self, loss: Loss) {
        self.repairer.note_loss(loss);
    }

    /// Datagrams of `segment` bytes each, the last may be shorter, go by the place. Gives what is to follow them.
    pub fn add(&mut self, now: Instant, datagrams: &[u8], segment: usize) -> Vec<Repairs> {
        let mut all = Vec::new();
        for datagram in datagrams.chunks(segment) {
            // What is sent here has been stamped.
            let Ok(header) = DataRepr::parse(datagram) else { continue };
            self.peer_flow = header.dst_flow;
            self.repairer.add(now, name_of(&header), datagram, |covered, repair| {
                write(&mut all, header.dst_flow, covered, repair);
            });
        }
        all
    }

    /// When something is to be sent by itself.
    pub fn deadline(&self) -> Option<Instant> {
        self.repairer.deadline()
    }

    /// Gives what is to be sent now.
    pub fn take_due(&mut self, now: Instant) -> Vec<Repairs> {
        let mut all = Vec::new();
        let peer_flow = self.peer_flow;
        self.repairer.close_due(now, |covered, repair| write(&mut all, peer_flow, covered, repair));
        all
    }
}

/// The receiving end of one place.
#[derive(Debug, Default)]
pub(crate) struct Restoring(Restorer);

/// What is brought back, if it is a datagram of this flow, and the one that it is said to be.
fn note_restored(all: &mut Vec<Vec<u8>>, flow: FlowId, name: ChunkName, datagram: &[u8]) {
    let is_it = |header: DataRepr| header.dst_flow == flow && name_of(&header) == name && header.stack != STACK_FEC;
    if DataRepr::parse(datagram).is_ok_and(is_it) {
        all.push(datagram.to_vec());
    }
}

impl Restoring {
    /// Whether a chunk that is about to be given on was brought back before, and given on then.
    pub fn is_late(&mut self, number: u32, index: u16) -> bool {
        self.0.is_late(ChunkName { number, index })
    }

    /// How many bytes are kept.
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// Keeps nothing.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Datagrams of one train have come by the place, as they were on the wire, and were taken. Gives what can be
    /// brought back now.
    pub fn keep(&mut self, run: &Run<'_>) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        let DataRepr { packet_number: number, dst_flow, .. } = run.header;
        for (index, datagram) in (run.header.index..).zip(run.datagrams()) {
            let name = ChunkName { number, index };
            self.0.keep(name, datagram, |name, datagram| note_restored(&mut all, dst_flow, name, datagram));
        }
        all
    }

    /// A repair has come by the place. As [`keep`](Self::keep).
    ///
    /// # Errors
    ///
    /// It is none.
    pub fn repair(&mut self, repair: &[u8]) -> Result<Vec<Vec<u8>>, DropReason> {
        let header = DataRepr::parse(repair).map_err(|_| DropReason::Malformed)?;
        let (covered, symbol) = Covered::parse(&repair[DATA_HEADER_LEN..]).map_err(|_| DropReason::Malformed)?;
        let of = RepairBeside { block: header.packet_number, index: header.index, count: header.count };
        let mut all = Vec::new();
        let give = |name, datagram: &[u8]| note_restored(&mut all, header.dst_flow, name, datagram);
        match self.0.repair(of, &covered, symbol, give) {
            Ok(()) => Ok(all),
            Err(Refused::Late) => Ok(Vec::new()),
            Err(Refused::Malformed | Refused::Far) => Err(DropReason::Malformed),
        }
    }
}

#[cfg(test)]
mod tests {
    use margay_wire::STACK_ENCAP;

    use super::*;

    fn chunk(number: u32, index: u16, count: u16) -> Vec<u8> {
        let header =
            DataRepr { stack: STACK_ENCAP, flags: 0, dst_flow: FlowId(7), packet_number: number, index, count };
        let mut datagram = vec![number as u8; DATA_HEADER_LEN + 100];
        header.emit(&mut datagram);
        datagram
    }

    fn run(datagram: &[u8]) -> Run<'_> {
        Run::single(DataRepr::parse(datagram).expect("stamped"), datagram)
    }

    fn losing() -> Repairing {
        let mut repairing = Repairing::default();
        repairing.note_loss(Loss { ppm: 50_000, row_thousandths: 1000 });
        repairing
    }

    #[test]
    fn repairs_fit_the_path_and_bring_back_what_was_on_the_wire() {
        let mut repairing = losing();
        let at = Instant::from_millis(1);
        let train = [chunk(4, 0, 2), chunk(4, 1, 2)].concat();
        let single = chunk(9, 0, 1);
        assert_eq!(repairing.add(at, &train, single.len()), []);
        assert_eq!(repairing.add(at, &single, single.len()), []);
        let due = repairing.deadline().expect("a block");
        assert_eq!(repairing.take_due(at), []);
        let repairs = repairing.take_due(due);
        let [Repairs { datagrams, segment }] = &repairs[..] else { panic!("one send: {repairs:?}") };
        assert!(datagrams.len() / segment >= 2 && *segment <= single.len() + usize::from(REPAIR_MORE));
        let mut restoring = Restoring::default();
        assert!(restoring.keep(&run(&chunk(4, 0, 2))).is_empty());
        let mut found = Vec::new();
        for repair in datagrams.chunks(*segment) {
            found.extend(restoring.repair(repair).expect("it is one"));
        }
        found.sort_unstable();
        assert_eq!(found, [chunk(4, 1, 2), single]);
    }

    #[test]
    fn what_is_brought_back_is_of_the_flow_and_no_repair() {
        let mut all = Vec::new();
        let name = ChunkName { number: 4, index: 0 };
        let of_fec = |header: DataRepr| {
            let mut datagram = vec![0; DATA_HEADER_LEN];
            header.emit(&mut datagram);
            datagram
        };
        let header = DataRepr::parse(&chunk(4, 0, 1)).expect("stamped");
        note_restored(&mut all, FlowId(7), name, &of_fec(DataRepr { stack: STACK_FEC, flags: REPAIR, ..header }));
        note_restored(&mut all, FlowId(8), name, &chunk(4, 0, 1));
        note_restored(&mut all, FlowId(7), name, &chunk(5, 0, 1));
        note_restored(&mut all, FlowId(7), name, &[1, 2]);
        assert_eq!(all, Vec::<Vec<u8>>::new());
        note_restored(&mut all, FlowId(7), name, &chunk(4, 0, 1));
        assert_eq!(all.len(), 1);
    }

    #[test]
    fn what_is_no_repair_is_refused() {
        let mut restoring = Restoring::default();
        for bad in [&[][..], &chunk(1, 0, 1)[..20], &chunk(1, 0, 1)] {
            assert_eq!(restoring.repair(bad), Err(DropReason::Malformed));
        }
    }
}
