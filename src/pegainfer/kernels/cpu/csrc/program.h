// Programs as Python encodes them (lower/cpu/encode.py). An instruction is a sequence of 64-bit words:
//   op
//   kv_format   what the KV cache or recurrent state holds: 0 float32, 1 float16, 2 e4m3, 3 bf16
//   operands    index into the table of addresses; negative where an optional operand is absent
//   axes        ≥ 0: the size; below: ~index into the step's sizes
//   attributes  doubles
// Operands are indices so that an input can be used where it lies: its address changes between steps.
#pragma once

#include <cstring>
#include <vector>

#include "instructions.h"

namespace pega {

// An instruction in a step.
struct Instr {
    int32_t op;
    int32_t kv_format;
    const int64_t* encoded;  // its words from the operands on
    int64_t* words;          // the same with addresses and sizes in place of indices

    // The op's arguments: Args is the struct that instructions.h has for `op`.
    template <class Args>
    Args args() const {
        static_assert(sizeof(void*) == 8, "an address takes a word");
        Args a;
        std::memcpy(&a, words, sizeof a);
        return a;
    }
};

// Finds the instructions of a program, whose words stay where they are. False where the one behind those
// found is malformed: an unknown op, too few words, or an axis that refers to a size that no step has.
inline bool find_instructions(const std::vector<int64_t>& program, std::vector<int64_t>& words,
                              int64_t num_sizes, std::vector<Instr>& found) {
    words.resize(program.size());
    const size_t end = program.size();
    for (size_t at = 0; at < end;) {
        const int64_t op = program[at];
        if (op < 0 || op >= kNumOps) return false;
        const Arity& arity = kArity[op];
        const size_t first = at + 2, axes = first + static_cast<size_t>(arity.operands);
        const size_t attrs = axes + static_cast<size_t>(arity.axes);
        at = attrs + static_cast<size_t>(arity.attrs);
        if (at > end) return false;
        for (size_t i = axes; i < attrs; i++)
            if (program[i] < 0 && ~program[i] >= num_sizes) return false;
        found.push_back({static_cast<int32_t>(op), static_cast<int32_t>(program[first - 1]),
                         program.data() + first, words.data() + first});
    }
    return true;
}

// Fills in this step's addresses and sizes.
inline void resolve(const Instr& in, void* const* table, const int64_t* sizes) {
    const Arity& arity = kArity[in.op];
    const int64_t* from = in.encoded;
    int64_t* to = in.words;
    for (int i = 0; i < arity.operands; i++, from++, to++)
        *to = *from < 0 ? 0 : reinterpret_cast<int64_t>(table[*from]);
    for (int i = 0; i < arity.axes; i++, from++, to++) *to = *from < 0 ? sizes[~*from] : *from;
    if (arity.attrs > 0) std::memcpy(to, from, static_cast<size_t>(arity.attrs) * sizeof *to);
}

}  // namespace pega
