#pragma once

#include <vector>

#include "recovery/pull/transfer.h"
#include "recovery/rpc/convert.h"

namespace rekindle::pull {

// One life of a node, and one of its layouts.
inline bool same_source(const proto::Source& a, const proto::Source& b) {
  return a.node().incarnation() == b.node().incarnation() &&
         rpc::from_proto(a.layout()) == rpc::from_proto(b.layout());
}

// A grant opens sessions for a minute only: those that are connected already need the newest, too,
// for a reconnect or the next transfer.
inline void refresh_grants(SourceTable& sources, const std::vector<proto::Source>& news) {
  for (ActiveSource& source : sources) {
    for (const auto& record : news) {
      if (!record.has_grant() || !same_source(record, source.record)) continue;
      *source.record.mutable_grant() = record.grant();
    }
  }
}

}  // namespace rekindle::pull
