//! Names and prefixes: read as they are written, and no text makes the reader stumble.

use margay_core::Ranges;
use margay_core::name::{Name, NameError, Prefix, ServiceId, is_computable};
use proptest::prelude::*;

proptest! {
    #[test]
    fn a_prefix_is_read_as_it_is_written(id in any::<[u8; 32]>(), bits in 0_u16..=256) {
        let prefix = Prefix::new(ServiceId(id), bits);
        let written = prefix.to_string();
        prop_assert_eq!(written.parse(), Ok(prefix));
        prop_assert_eq!(written.to_ascii_uppercase().replace("SID:", "sid:").parse(), Ok(prefix));
        prop_assert!(prefix.contains(&ServiceId(id)));
        // The first bit beyond does not matter, the last one within does.
        let flipped = |bit: u16| {
            let mut other = id;
            other[usize::from(bit / 8)] ^= 0x80 >> (bit % 8);
            ServiceId(other)
        };
        prop_assert!(bits == 256 || prefix.contains(&flipped(bits)));
        prop_assert!(bits == 0 || !prefix.contains(&flipped(bits - 1)));
    }

    #[test]
    fn one_prefix_covers_another_exactly_when_it_contains_all_of_it(
        id in any::<[u8; 32]>(), wide in 0_u16..=256, narrow in 0_u16..=256, flip in 0_u16..256,
    ) {
        let mut other = id;
        other[usize::from(flip / 8)] ^= 0x80 >> (flip % 8);
        let (wide, narrow) = (Prefix::new(ServiceId(id), wide), Prefix::new(ServiceId(other), narrow));
        let same_head = flip >= wide.bits.min(256);
        prop_assert_eq!(wide.covers(&narrow), wide.bits <= narrow.bits && (same_head || narrow.bits == 0));
    }

    #[test]
    fn names_of_services_are_read_as_they_are_written(text in "[a-z0-9]{1,10}\\.[a-z0-9]{1,10}(/key:[ -~]{1,20})?") {
        let name: Name = text.parse().map_err(|error: NameError| TestCaseError::fail(error.to_string()))?;
        prop_assert_eq!(name.written(), &text);
        prop_assert_eq!(name.to_string().parse(), Ok(name.clone()));
        prop_assert_eq!(name.prefix().bits, 256);
        let id = name.service_id();
        if text.contains('/') {
            prop_assert!(!is_computable(&id));
        } else {
            let ranges = Ranges::USUAL;
            prop_assert_eq!(ranges.service_of_v6(ranges.virtual_v6(&id)), Some(id));
        }
    }

    #[test]
    fn no_text_makes_the_reader_stumble(text in "(sid:)?\\PC{0,80}(/[0-9]{0,4})?") {
        if let Err(error) = text.parse::<Name>() {
            prop_assert!(!error.to_string().is_empty());
        }
        let _ = text.parse::<Prefix>();
    }

    #[test]
    fn a_bad_character_is_named_with_its_place(head in "[a-z]{1,9}", bad in "[^a-zA-Z0-9./-]", tail in "[a-z]{0,9}") {
        let text = format!("{head}{bad}{tail}.shop");
        let at = head.len() + 1;
        let found = bad.chars().next().expect("one character");
        prop_assert_eq!(text.parse::<Name>(), Err(NameError::Character { name: text.clone(), at, found }));
    }
}

/// As docs/book/wire.md has it.
#[test]
fn routers_are_asked_for_by_bits_that_other_programs_can_make() {
    let id = ServiceId::of_routers([7; 8]);
    assert_eq!(id.0[..12], [7, 7, 7, 7, 7, 7, 7, 7, 0x69, 0x40, 0xea, 0xd3]);
    assert_eq!(id.0[12..], [0; 20]);
}
