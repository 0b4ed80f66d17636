//! Loops compiled for the processor at hand.
//!
//! Responsible for the choice between a loop for any processor and the same loop for one with wider registers. The
//! arithmetic is the same in all, operation by operation, so the bits are: what is fused (`f32::mul_add`) is fused in all, and
//! nothing is reordered. Not responsible for the loops.

/// Registers that this processor has: none of another kind can be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Registers(Width);

/// How wide they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    /// What every processor of the kind has.
    Any,
    /// 256 bits, and a multiplication and addition in one.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 512 bits, and the same.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Registers {
    /// The widest of this processor.
    pub(crate) fn widest() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if has_avx512() {
                return Self(Width::Avx512);
            }
            if has_avx2() {
                return Self(Width::Avx2);
            }
        }
        Self(Width::Any)
    }

    /// All of this processor.
    #[cfg(test)]
    pub(crate) fn all() -> Vec<Self> {
        let mut all = vec![Self(Width::Any)];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(has_avx2().then_some(Self(Width::Avx2)));
            all.extend(has_avx512().then_some(Self(Width::Avx512)));
        }
        all
    }

    /// How wide they are.
    pub(crate) const fn width(self) -> Width {
        self.0
    }
}

/// Whether there is what the loops for 256 bits are compiled for.
#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// Whether there is what the loops for 512 bits are compiled for.
#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

/// Generates a function that runs a loop, inlined, as it is compiled for the registers that come first.
macro_rules! for_registers {
    ($visibility:vis $name:ident, $plain:ident, $($argument:ident: $type:ty),*) => {
        $visibility fn $name(registers: $crate::fastest::Registers, $($argument: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn on_avx2($($argument: $type),*) {
                    $plain($($argument),*);
                }
                #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
                fn on_avx512($($argument: $type),*) {
                    $plain($($argument),*);
                }
                match registers.width() {
                    $crate::fastest::Width::Any => {}
                    $crate::fastest::Width::Avx2 => {
                        #[expect(unsafe_code, reason = "a function for a processor that this is")]
                        // SAFETY: the processor has what the function is compiled for, or there were no such registers.
                        return unsafe { on_avx2($($argument),*) };
                    }
                    $crate::fastest::Width::Avx512 => {
                        #[expect(unsafe_code, reason = "a function for a processor that this is")]
                        // SAFETY: as above.
                        return unsafe { on_avx512($($argument),*) };
                    }
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            let _ = registers;
            $plain($($argument),*);
        }
    };
}

pub(crate) use for_registers;
