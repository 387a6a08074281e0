#pragma once

// Mistakes that the simulation must find (tests/sim). Compiled only where REKINDLE_SEEDED_BUGS is
// defined, which no product target does; there a test chooses one at run time.
namespace rekindle::coordinator {

enum class SeededBug {
  kNone,
  kEpochNotRaised,       // an agent that saw a later term is taken on below it
  kIdTaken,              // a node id is given away while its holder lives
  kDeadOffered,          // a dead node stays in the plans
  kDrainedOffered,       // a draining node is put into new plans
  kShareLeakedAtClose,   // closing a pull keeps its shares
  kLatestGoesBack,       // `latest` is resolved in the grace though holders have yet to report
  kTombstoneForgotten,   // a retired version is dropped from the table
  kRetiredUnderReaders,  // a holder is told to let go while somebody reads
  kTwoRecopies,          // a version short of copies gets a second task beside the first
  kCommitWithoutAll,     // an instance is committed while a rank still loads
  kResolvedTwice,        // `latest` is resolved for each rank by itself
};

#ifdef REKINDLE_SEEDED_BUGS
inline SeededBug seeded_bug = SeededBug::kNone;
inline bool seeded(SeededBug bug) { return seeded_bug == bug; }
#else
constexpr bool seeded(SeededBug) { return false; }
#endif

}  // namespace rekindle::coordinator
