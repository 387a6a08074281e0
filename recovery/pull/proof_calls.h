#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/pull/source_table.h"
#include "src/async/task.h"
#include "src/base/digest.h"

namespace rekindle::pull {

// Asks sources for proofs of parts of tiles. A few calls run at a time for each source and the
// others wait in line: many small slices do not reach a source's limit of open calls. Always in a
// shared_ptr. Control thread only, except ask().
class ProofCalls : public std::enable_shared_from_this<ProofCalls> {
 public:
  using Done = std::function<void(RangeProofs)>;
  ProofCalls(boost::asio::any_io_executor executor, std::shared_ptr<SourceTable> sources,
             Digest root);

  void ask(transport::SourceIndex source, std::vector<planner::TileWork> items, Done done);
  // Calls that wait in line and later ones end with kUnavailable. Calls under way end by
  // themselves.
  void close();

 private:
  struct Call {
    std::vector<planner::TileWork> items;
    Done done;
  };
  struct Line {
    int under_way = 0;
    std::deque<Call> waiting;
  };
  void start(transport::SourceIndex source);
  static async::Task<void> run(std::shared_ptr<ProofCalls> self, transport::SourceIndex source,
                               Call call);
  async::Task<RangeProofs> fetch(transport::SourceIndex source,
                                 std::vector<planner::TileWork> items);

  const boost::asio::any_io_executor executor_;
  const std::shared_ptr<SourceTable> sources_;
  const Digest root_;
  std::map<transport::SourceIndex, Line> lines_;
  bool closed_ = false;
};

}  // namespace rekindle::pull
