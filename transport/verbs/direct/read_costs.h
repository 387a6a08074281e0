#pragma once

#include <cstdint>

#include "transport/read_op.h"

// The choice between the two ways to read the runs of a strided ReadOp. Pure.
namespace rekindle::transport::verbs {

// The time that each step takes: of the one thread that serves a NIC, and of the wire. The CPU
// times are those of one machine (docs/reference/performance.md, "RDMA"). Only their ratios matter,
// and a slower CPU copies more slowly, too.
struct ReadCosts {
  // A READ of one scatter entry: expanded, posted and retired. Half of it is an allowance for the
  // provider of the NIC, which was not measured.
  double request_ns = 45;
  double entry_ns = 10;  // each further scatter entry
  double copied_run_ns = 2;
  double copied_byte_ns = 0.07;
  double wire_byte_ns = 0.02;  // 400 Gb/s
};

// The memory of the puller that an op lands in.
enum class Landing : std::uint8_t { kRegistered, kUnregistered };

// How the runs of an op are read.
enum class RunReads : std::uint8_t {
  // Straight to their places: a READ for each run, or for each scatter list if the runs are
  // consecutive at the source.
  kInPlace,
  // Many runs with one READ, with the gaps between them, into a bounce block. The thread copies
  // them from there to their places.
  kTogether,
};

// The cheaper way for an op of several runs. The wire and the CPU work side by side, so the slower
// one of them decides. `entries`: how many a scatter list holds.
RunReads cheaper_reads(const ReadOp& op, Landing landing, std::uint32_t entries,
                       const ReadCosts& costs);

}  // namespace rekindle::transport::verbs
