//! Modules of WebAssembly that decide which member a request goes to: the paper's ALRMs (docs/decisions/0078).
//!
//! A module is checked when it is loaded: what it imports and exports, its version, its size. Each connection has an
//! instance of its own ([`Guest`]), with memory that is bounded, and fuel for each call: what one connection's instance
//! does is no other connection's affair. There is no clock, no random number, no float and no thread, so the same
//! calls have the same answers.

mod facts;
mod guest;
mod trial;

pub(crate) use guest::{Answer, Guest};
pub use trial::{Trial, Tried};

use std::fs::File;
use std::io::Read;
use std::path::Path;

use facts::{Facts, IMPORTS, linker};
use thiserror::Error;
use wasmi::{CompilationMode, Config, EnforcedLimits, Engine, ExternType, FuncType, Linker, ValType};

/// The interface that this switch has: what `alrm_version` of a module answers.
pub const INTERFACE_VERSION: i32 = 1;
/// Bytes of a module's file at most.
pub const MODULE_MAX: usize = 1 << 20;
/// Bytes of memory that an instance may have.
pub const MEMORY_MAX: usize = 1 << 20;
/// Bytes of a request that a module is given: longer ones it sees the beginning of.
pub const FRAME_MAX: usize = 2048;
/// Instructions of the interpreter, roughly, for each call, with what the switch does for the module meanwhile: a
/// millisecond or two of the slowest processors.
const FUEL: u64 = 200_000;
/// Calls within each other.
const DEPTH_MAX: usize = 128;
/// Bytes of the interpreter's own stack, for all calls within each other.
const STACK_MAX: usize = 256 << 10;

/// Why a module is not taken.
#[derive(Debug, Error)]
pub enum Refused {
    /// Its file cannot be read.
    #[error("{path} cannot be read: {error}")]
    File {
        /// The file.
        path: String,
        /// What the operating system says.
        error: std::io::Error,
    },
    /// It is too large.
    #[error("the module has more than {MODULE_MAX} bytes; build it with -C opt-level=s and -C strip=symbols")]
    TooLarge,
    /// It is none that may run here.
    #[error("this is no module that a switch runs: {0}")]
    Invalid(String),
    /// It wants what a switch does not give.
    #[error("the module imports {module}.{name} as a switch does not have it; {}", imports())]
    Import {
        /// Of which module.
        module: String,
        /// Its name.
        name: String,
    },
    /// A function is missing, or is another.
    #[error("the module exports no function {0} as the interface has it")]
    Export(&'static str),
    /// There is no memory for frames.
    #[error("the module exports no memory of its own under the name `memory`")]
    Memory,
    /// It is of another interface.
    #[error(
        "the module is of interface {0}, and this switch has {INTERFACE_VERSION}; build it with this one's template"
    )]
    Version(i32),
    /// Its first calls have failed.
    #[error("the module does not start: {0}")]
    Start(String),
}

fn imports() -> String {
    let names: Vec<&str> = IMPORTS.iter().map(|(name, ..)| *name).collect();
    format!("there are margay.{}", names.join(", "))
}

/// What a module must export, and what it may; of which types.
const EXPORTS: [Export; 12] = [
    Export::required("alrm_version", &[], &[ValType::I32]),
    Export::required("alrm_frame", &[], &[ValType::I32]),
    Export::required("redirect", &[ValType::I32, ValType::I32, ValType::I32, ValType::I64], &[ValType::I64]),
    Export::optional("alrm_init", &[]),
    Export::optional("alrm_uninit", &[]),
    Export::optional("add_conn", &[ValType::I32]),
    Export::optional("rm_conn", &[ValType::I32]),
    Export::optional("add_member", &[ValType::I32]),
    Export::optional("rm_member", &[ValType::I32]),
    Export::optional("retire", &[ValType::I64]),
    Export::answering("alrm_state", &[]),
    Export::answering("adopt", &[ValType::I32]),
];

struct Export {
    name: &'static str,
    params: &'static [ValType],
    results: &'static [ValType],
    is_required: bool,
}

impl Export {
    const fn required(name: &'static str, params: &'static [ValType], results: &'static [ValType]) -> Self {
        Self { name, params, results, is_required: true }
    }

    const fn optional(name: &'static str, params: &'static [ValType]) -> Self {
        Self { name, params, results: &[], is_required: false }
    }

    /// As an optional one, with a number as its answer.
    const fn answering(name: &'static str, params: &'static [ValType]) -> Self {
        Self { name, params, results: &[ValType::I32], is_required: false }
    }

    fn check(&self, module: &wasmi::Module) -> Result<(), Refused> {
        match module.get_export(self.name) {
            None if !self.is_required => Ok(()),
            Some(ExternType::Func(ty)) if is_of(&ty, self.params, self.results) => Ok(()),
            _ => Err(Refused::Export(self.name)),
        }
    }
}

fn is_of(ty: &FuncType, params: &[ValType], results: &[ValType]) -> bool {
    ty.params() == params && ty.results() == results
}

/// A module that was checked.
#[derive(Debug)]
pub struct Module {
    engine: Engine,
    compiled: wasmi::Module,
    linker: Linker<Facts>,
    hash: String,
}

impl Module {
    /// Reads the bytes of a module from its file.
    ///
    /// # Errors
    ///
    /// [`Refused`]: the file cannot be read. What is too large is refused by [`Module::new`].
    pub fn bytes_of(path: &Path) -> Result<Vec<u8>, Refused> {
        let failed = |error| Refused::File { path: path.display().to_string(), error };
        let mut bytes = Vec::new();
        // One byte more shows that it is too large.
        File::open(path).and_then(|file| file.take(MODULE_MAX as u64 + 1).read_to_end(&mut bytes)).map_err(failed)?;
        Ok(bytes)
    }

    /// Reads and checks a module.
    ///
    /// # Errors
    ///
    /// [`Refused`].
    pub fn read(path: &Path) -> Result<Self, Refused> {
        Self::new(&Self::bytes_of(path)?)
    }

    /// Checks a module, and has an instance of it run its first calls.
    ///
    /// # Errors
    ///
    /// [`Refused`].
    pub fn new(bytes: &[u8]) -> Result<Self, Refused> {
        if bytes.len() > MODULE_MAX {
            return Err(Refused::TooLarge);
        }
        let engine = Engine::new(&config());
        let compiled = wasmi::Module::new(&engine, bytes).map_err(|error| Refused::Invalid(error.to_string()))?;
        for import in compiled.imports() {
            let known = IMPORTS.iter().find(|(name, ..)| import.module() == "margay" && import.name() == *name);
            let is_same = match (known, import.ty()) {
                (Some((_, params, results)), ExternType::Func(ty)) => is_of(ty, params, results),
                _ => false,
            };
            if !is_same {
                let module = import.module().to_owned();
                return Err(Refused::Import { module, name: import.name().to_owned() });
            }
        }
        EXPORTS.iter().try_for_each(|export| export.check(&compiled))?;
        if !matches!(compiled.get_export("memory"), Some(ExternType::Memory(_))) {
            return Err(Refused::Memory);
        }
        let linker = linker(&engine).map_err(|error| Refused::Invalid(error.to_string()))?;
        let hash = blake3::hash(bytes).to_hex().to_string();
        let module = Self { engine, compiled, linker, hash };
        // It shows now whether its first calls succeed.
        Guest::start(&module)?;
        Ok(module)
    }

    /// Whether connections that another module has, or none, may come to this one.
    pub fn adopts(&self) -> bool {
        self.compiled.get_export("adopt").is_some()
    }

    /// The BLAKE3 hash of its bytes, in hexadecimal digits.
    pub fn hash(&self) -> &str {
        &self.hash
    }
}

fn config() -> Config {
    let mut config = Config::default();
    config
        .floats(false)
        .consume_fuel(true)
        .allow_start_fn(false)
        .ignore_custom_sections(true)
        .compilation_mode(CompilationMode::Eager)
        .enforced_limits(EnforcedLimits::strict())
        .set_max_recursion_depth(DEPTH_MAX)
        .set_max_stack_height(STACK_MAX)
        .wasm_multi_memory(false);
    config
}

#[cfg(test)]
mod test;
#[cfg(test)]
pub(crate) use test::sample;
