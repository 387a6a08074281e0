#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "proto/coordinator.pb.h"
#include "recovery/pull/pull_policy.h"
#include "recovery/pull/slice_verifier.h"
#include "recovery/pull/source_peer.h"

namespace rekindle::pull {

// A source that a pull reads from: a peer, or bytes that are mapped here already. Control thread
// only.
struct ActiveSource {
  std::string name;
  // The coordinator's record and the connection of a peer. Null for local bytes.
  proto::Source record;
  std::shared_ptr<SourcePeer> peer;
  std::shared_ptr<const Layout> layout;
  // What it is known to hold while it is being filled. nullopt: all of its layout.
  std::optional<TileSet> held;
  // Bytes that are mapped here, and the owner that keeps them mapped.
  std::vector<std::span<const std::byte>> local_segments;
  std::shared_ptr<const void> keep_alive;
  // Transports with a handshake that have worked, and transports that broke again after a
  // reconnect.
  std::set<std::string> used;
  std::set<std::string> avoid;

  // State of the transfer that runs. `bytes` have verified; `wrong` is known at its end.
  SourceState state;
  std::string transport;
  std::optional<PeerSession> session;
  // When its paths were opened.
  TimePoint connected_at{};
  // Of the session, for this pull alone; 0: none.
  std::uint64_t cap_bytes_per_second = 0;
  std::uint64_t bytes = 0;
  WrongBytes wrong;

  // It keeps the proofs of the parts of tiles that it has. A copy that is being filled does not say
  // so before it is complete.
  bool proves_parts() const { return !held && record.proves_parts(); }
  // True: it holds more than was known.
  bool learn_held(const swarm::TileRuns& runs);
  void learn_complete();
};

// Grows while coroutines refer to its elements, which therefore never move.
using SourceTable = std::deque<ActiveSource>;

// Whether both are one life of a node, with one of its layouts.
bool same_source(const proto::Source& a, const proto::Source& b);

// A grant opens sessions for a minute only. Sources that are connected already need the newest one
// as well, for a reconnect or the next transfer.
void refresh_grants(SourceTable& sources, const std::vector<proto::Source>& news);

// Sources that are being filled.
bool any_growing(const SourceTable& sources);
transport::SourceMask growing_sources(const SourceTable& sources);

}  // namespace rekindle::pull
