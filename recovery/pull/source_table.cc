#include "recovery/pull/source_table.h"

#include "recovery/rpc/convert.h"

namespace rekindle::pull {

bool ActiveSource::learn_held(const swarm::TileRuns& runs) {
  if (!held) return false;
  const TileIndex before = held->count();
  for (const auto& [begin, end] : runs) held->set_range(begin, end);
  return held->count() > before;
}

void ActiveSource::learn_complete() {
  held.reset();
  record.set_complete(true);
  record.clear_held();
}

bool same_source(const proto::Source& a, const proto::Source& b) {
  return a.node().incarnation() == b.node().incarnation() &&
         rpc::from_proto(a.layout()) == rpc::from_proto(b.layout());
}

void refresh_grants(SourceTable& sources, const std::vector<proto::Source>& news) {
  for (ActiveSource& source : sources) {
    for (const auto& record : news) {
      if (!record.has_grant() || !same_source(record, source.record)) continue;
      *source.record.mutable_grant() = record.grant();
    }
  }
}

transport::SourceMask growing_sources(const SourceTable& sources) {
  transport::SourceMask growing;
  for (transport::SourceIndex i = 0; i < sources.size(); ++i) {
    if (sources[i].held) growing.set(i);
  }
  return growing;
}

bool any_growing(const SourceTable& sources) { return !growing_sources(sources).empty(); }

}  // namespace rekindle::pull
