//! The kernel objects, which the build script embeds into this binary.

use crate::error::Error;

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/kernel.o"));
static TRACED: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/kernel-trace.o"));

/// The kernel object; an error if the binary was built without it.
pub(crate) fn bytes() -> Result<&'static [u8], Error> {
    if OBJECT.is_empty() { Err(Error::NoKernelObject) } else { Ok(OBJECT) }
}

/// The kernel object with the traced variant of the programs; an error if the binary was built without it.
pub(crate) fn traced() -> Result<&'static [u8], Error> {
    if TRACED.is_empty() { Err(Error::NoTracedPrograms) } else { Ok(TRACED) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use aya_obj::{
        Object,
        generated::{
            BPF_ADD, BPF_ALU64, BPF_CALL, BPF_JMP, BPF_K, BPF_LDX, BPF_MOV, BPF_PSEUDO_CALL, BPF_REG_10,
            BPF_ST, BPF_STX, BPF_X, bpf_insn,
        },
    };

    use super::*;

    /// `MAX_BPF_STACK`: what the frames of a chain of calls may take together, in bytes.
    const MAX_STACK: usize = 512;
    /// What the verifier rounds each frame up to, in bytes, before Linux 6.8.
    const FRAME_UNIT: usize = 32;

    /// A function of a program: its frame, and the functions that it calls, by their first instructions.
    #[derive(Debug, Default)]
    struct Frame {
        size: usize,
        calls: Vec<usize>,
    }

    /// The functions of a linked program, by their first instructions; that of the program itself is 0.
    fn frames(code: &[bpf_insn]) -> BTreeMap<usize, Frame> {
        let is_call = |it: &bpf_insn| {
            it.code == (BPF_JMP | BPF_CALL) as u8 && u32::from(it.src_reg()) == BPF_PSEUDO_CALL
        };
        let target = |at: usize| (at + 1).strict_add_signed(code[at].imm as isize);
        let calls = || (0..code.len()).filter(|at| is_call(&code[*at]));
        let mut frames: BTreeMap<_, _> =
            calls().map(target).chain([0]).map(|at| (at, Frame::default())).collect();
        calls().for_each(|at| frame_of(&mut frames, at).calls.push(target(at)));
        let mut is_top = [false; 16];
        for (at, it) in code.iter().enumerate() {
            let (to, from) = (usize::from(it.dst_reg()), usize::from(it.src_reg()));
            let of_frame = |register| register == BPF_REG_10 as usize;
            let offset = match u32::from(it.code) {
                code if code == (BPF_ALU64 | BPF_MOV | BPF_X) => {
                    is_top[to] = of_frame(from);
                    0
                }
                code if code == (BPF_ALU64 | BPF_ADD | BPF_K) && is_top[to] => {
                    is_top[to] = false;
                    it.imm
                }
                code if code & 7 == BPF_LDX && of_frame(from) => it.off.into(),
                code if matches!(code & 7, BPF_ST | BPF_STX) && of_frame(to) => it.off.into(),
                _ => 0,
            };
            let frame = frame_of(&mut frames, at);
            frame.size = frame.size.max((-offset).max(0) as usize);
        }
        frames
    }

    /// The function that has an instruction.
    fn frame_of(frames: &mut BTreeMap<usize, Frame>, at: usize) -> &mut Frame {
        frames.range_mut(..=at).next_back().expect("the first one begins at 0").1
    }

    /// What the longest chain of calls from a function takes.
    fn depth(frames: &BTreeMap<usize, Frame>, at: usize) -> usize {
        let Frame { size, calls } = &frames[&at];
        let deepest = calls.iter().map(|it| depth(frames, *it)).max().unwrap_or(0);
        (*size).max(1).next_multiple_of(FRAME_UNIT) + deepest
    }

    #[test]
    fn the_frames_of_programs_fit_into_the_stack_of_old_kernels() {
        for object in [bytes(), traced()] {
            let Ok(object) = object else {
                return eprintln!("skipped: there is no kernel object: cargo xtask build-ebpf");
            };
            let mut object = Object::parse(object).unwrap();
            let sections = object.functions.keys().map(|(section, _)| *section).collect();
            object.relocate_calls(&sections).unwrap();
            for (name, program) in &object.programs {
                let code = &object.functions[&program.function_key()].instructions;
                let depth = depth(&frames(code), 0);
                println!("{name}: {depth}");
                assert!((FRAME_UNIT..=MAX_STACK).contains(&depth), "{name}: {depth} bytes");
            }
        }
    }
}
