//! Bytes as text that people copy: a word that says what it is, base32 in lower case, and a checksum of four bytes of
//! BLAKE3.

use data_encoding::BASE32_NOPAD;
use zeroize::Zeroizing;

const CHECKSUM_LEN: usize = 4;

/// One kind of such text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Armor {
    /// What stands before the digits.
    pub prefix: &'static str,
    /// What people call it.
    pub noun: &'static str,
    /// Which command makes one.
    pub made_by: &'static str,
    /// Longer texts are none.
    pub text_max: usize,
}

/// What is wrong with a text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArmorError {
    /// Something else altogether.
    #[error("a {} begins with `{}`; {} makes one", .0.noun, .0.prefix, .0.made_by)]
    NotOne(Armor),
    /// A character that is no digit.
    #[error(
        "character {at} of the {} is {found:?}; it has only a-z and 2-7: was it cut or wrapped when it was copied?", .of.noun
    )]
    Character {
        /// Of what.
        of: Armor,
        /// Which, from 1.
        at: usize,
        /// What stands there.
        found: char,
    },
    /// Characters are missing.
    #[error("the {} is incomplete; copy all of it", .0.noun)]
    Incomplete(Armor),
    /// Characters were changed.
    #[error("the {} was changed or cut: its checksum is wrong; copy it again", .0.noun)]
    Checksum(Armor),
}

impl Armor {
    /// As text.
    pub fn write(self, body: &[u8]) -> Zeroizing<String> {
        let mut bytes = Zeroizing::new(Vec::with_capacity(body.len() + CHECKSUM_LEN));
        bytes.extend_from_slice(body);
        bytes.extend_from_slice(&blake3::hash(body).as_bytes()[..CHECKSUM_LEN]);
        let digits = Zeroizing::new(BASE32_NOPAD.encode(&bytes));
        Zeroizing::new(format!("{}{}", self.prefix, digits.to_ascii_lowercase()))
    }

    /// From text, in small letters or capitals, with blanks around it. What it gives is not empty.
    ///
    /// # Errors
    ///
    /// It is no text of this kind, or was changed on its way.
    pub fn read(self, text: &str) -> Result<Zeroizing<Vec<u8>>, ArmorError> {
        let text = text.trim();
        let digits = text.strip_prefix(self.prefix).filter(|_| text.len() <= self.text_max);
        let digits = digits.ok_or(ArmorError::NotOne(self))?;
        let is_digit = |c: &char| matches!(c, 'a'..='z' | 'A'..='Z' | '2'..='7');
        if let Some((at, found)) = digits.chars().enumerate().find(|(_, c)| !is_digit(c)) {
            return Err(ArmorError::Character { of: self, at: self.prefix.len() + at + 1, found });
        }
        // The alphabet is right, so what fails here is a length that no encoder makes.
        let upper = Zeroizing::new(digits.to_ascii_uppercase());
        let bytes = BASE32_NOPAD.decode(upper.as_bytes()).map(Zeroizing::new);
        let mut bytes = bytes.map_err(|_| ArmorError::Incomplete(self))?;
        let split = bytes.len().checked_sub(CHECKSUM_LEN).filter(|split| *split > 0);
        let split = split.ok_or(ArmorError::Incomplete(self))?;
        if blake3::hash(&bytes[..split]).as_bytes()[..CHECKSUM_LEN] != bytes[split..] {
            return Err(ArmorError::Checksum(self));
        }
        bytes.truncate(split);
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARMOR: Armor = Armor { prefix: "margay-test-", noun: "test text", made_by: "`margay test`", text_max: 200 };

    #[test]
    fn text_is_read_as_it_was_written_even_in_capitals() {
        let text = ARMOR.write(&[1, 2, 3]);
        assert_eq!(*text, "margay-test-aebahmlx5qnq", "one body has one text");
        let shouted = format!(" {}{}\n", ARMOR.prefix, text[ARMOR.prefix.len()..].to_uppercase());
        assert_eq!(ARMOR.read(&shouted).expect("the same").as_slice(), [1, 2, 3]);
    }

    #[test]
    fn every_damage_is_noticed_and_named() {
        let text = ARMOR.write(&[7; 40]);
        assert_eq!(ARMOR.read("web.shop"), Err(ArmorError::NotOne(ARMOR)));
        assert_eq!(ARMOR.read(ARMOR.prefix), Err(ArmorError::Incomplete(ARMOR)));
        assert_eq!(ARMOR.read(&ARMOR.write(&[7; 140])), Err(ArmorError::NotOne(ARMOR)), "too long");
        let broken = format!("{} {}", &text[..40], &text[40..]);
        assert_eq!(ARMOR.read(&broken), Err(ArmorError::Character { of: ARMOR, at: 41, found: ' ' }));
        for len in ARMOR.prefix.len()..text.len() {
            assert!(ARMOR.read(&text[..len]).is_err(), "cut at {len}");
        }
        for at in ARMOR.prefix.len()..text.len() {
            let mut other = text.as_bytes().to_vec();
            other[at] = if other[at] == b'a' { b'b' } else { b'a' };
            // The last character has bits that no byte uses; those must be zero.
            assert!(ARMOR.read(std::str::from_utf8(&other).expect("ASCII")).is_err(), "changed at {at}");
        }
    }
}
