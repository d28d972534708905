//! Why an instance has the weight 0, in the words of its host: for lists of people. Nothing is decided by it.

use std::fmt;

use super::proto;

/// Characters that are kept of the reason of a sickness.
pub const SICK_TEXT_MAX: usize = 200;

/// Why an instance takes no new flows. Several reasons may hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ZeroWeight {
    /// It is drained.
    pub is_drained: bool,
    /// An operator, or the configuration, gives it the weight 0.
    pub is_ordered: bool,
    /// Its load leaves nothing of its weight.
    pub is_loaded: bool,
    /// Its checks fail, and why; up to [`SICK_TEXT_MAX`] characters.
    pub sick: Option<String>,
}

impl ZeroWeight {
    /// What the other end wrote of an instance with this weight; `None` where it says nothing, as hosts of earlier
    /// versions do, or nothing that fits. The text is cut, and made one line.
    pub(crate) fn read(found: Option<proto::ZeroWeight>, weight: u32) -> Option<Box<Self>> {
        let found = found.filter(|_| weight == 0)?;
        let plain = |letter: char| if letter.is_control() { ' ' } else { letter };
        let sick = found.sick.map(|text| text.chars().map(plain).take(SICK_TEXT_MAX).collect());
        let read = Self { is_drained: found.drained, is_ordered: found.ordered, is_loaded: found.loaded, sick };
        (read != Self::default()).then(|| Box::new(read))
    }

    /// Whether the same reasons hold, however the one of a sickness is worded.
    pub fn is_like(&self, other: &Self) -> bool {
        let reasons = |one: &Self| [one.is_drained, one.is_ordered, one.is_loaded, one.sick.is_some()];
        reasons(self) == reasons(other)
    }
}

impl From<ZeroWeight> for proto::ZeroWeight {
    fn from(known: ZeroWeight) -> Self {
        let ZeroWeight { is_drained, is_ordered, is_loaded, sick } = known;
        Self { drained: is_drained, ordered: is_ordered, loaded: is_loaded, sick }
    }
}

impl fmt::Display for ZeroWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sick =
            self.sick.as_ref().map(|why| if why.is_empty() { "sick".to_owned() } else { format!("sick: {why}") });
        let said = |is_so: bool, word: &str| is_so.then(|| word.to_owned());
        let reasons = [
            said(self.is_drained, "drained"),
            sick,
            said(self.is_loaded, "no weight left by its load"),
            said(self.is_ordered, "weight 0 by order"),
        ];
        f.write_str(&reasons.into_iter().flatten().collect::<Vec<_>>().join("; "))
    }
}

#[cfg(test)]
mod test {
    use prost::Message as _;

    use super::*;

    #[test]
    fn all_reasons_are_said_in_one_line() {
        let text = |known: ZeroWeight| known.to_string();
        assert_eq!(text(ZeroWeight { is_drained: true, ..ZeroWeight::default() }), "drained");
        let sick = Some("10.0.0.2:80: answers 503".to_owned());
        let all = ZeroWeight { is_drained: true, is_ordered: true, is_loaded: true, sick };
        assert_eq!(
            text(all.clone()),
            "drained; sick: 10.0.0.2:80: answers 503; no weight left by its load; weight 0 by order"
        );
        let other_words = ZeroWeight { sick: Some("it timed out".to_owned()), ..all.clone() };
        assert!(all.is_like(&other_words) && !all.is_like(&ZeroWeight { sick: None, ..all.clone() }));
        assert_eq!(text(ZeroWeight { sick: Some(String::new()), ..ZeroWeight::default() }), "sick");
    }

    #[test]
    fn what_a_host_says_is_bounded_and_means_something_with_the_weight_0_alone() {
        let long = format!("a\u{1b}[2J\n{}", "x".repeat(300));
        let said = proto::ZeroWeight { sick: Some(long), ..proto::ZeroWeight::default() };
        let read = ZeroWeight::read(Some(said.clone()), 0).expect("sick");
        let text = read.sick.clone().expect("a text");
        assert!(text.starts_with("a [2J xxx") && text.chars().count() == SICK_TEXT_MAX, "{text}");
        assert_eq!(ZeroWeight::read(Some(said), 1), None);
        assert_eq!(ZeroWeight::read(Some(proto::ZeroWeight::default()), 0), None);
        assert_eq!(ZeroWeight::read(None, 0), None);
        assert_eq!(ZeroWeight::read(Some((*read).clone().into()), 0), Some(read));
    }

    #[test]
    fn the_field_is_skipped_by_who_does_not_know_it_and_missing_from_who_does_not_say_it() {
        let known = ZeroWeight { is_drained: true, sick: Some("no".to_owned()), ..ZeroWeight::default() };
        let said = proto::Register { name: "web.shop".to_owned(), ..proto::Register::default() };
        let bare = said.encode_to_vec();
        assert_eq!(proto::Register::decode(&bare[..]).expect("ours").zero_weight, None, "an earlier version's");
        let with = proto::Register { zero_weight: Some(known.into()), ..said }.encode_to_vec();
        assert_eq!(with[..bare.len()], bare, "what was there before stays as it was");
        assert_eq!(with[bare.len()..], *b"\x6a\x06\x08\x01\x22\x02no");
    }
}
