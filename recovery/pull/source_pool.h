#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "recovery/pull/fetch_turns.h"
#include "recovery/pull/pull_context.h"
#include "recovery/pull/pull_policy.h"
#include "recovery/pull/source_table.h"
#include "recovery/pull/transfer.h"
#include "src/async/task.h"

namespace rekindle::pull {

// The sources of one pull: finds and connects them, before a transfer and while it runs, learns
// what they hold, and forgets those that are lost. Control thread only.
class SourcePool {
 public:
  explicit SourcePool(PullContext& context);

  const std::shared_ptr<SourceTable>& table() const { return table_; }
  SourceTable& sources() { return *table_; }
  const SourceFaults& faults() const { return faults_; }

  // Dials every listed source that is not connected yet, all at once.
  async::Task<void> connect();
  // Asks for a new list as well, while the sources that are listed already are dialled.
  async::Task<void> look();
  async::Task<void> wait_to_ask_again();
  // Ends when it is cancelled. Pullers that begin at the same time do not know each other: the
  // coordinator names them while they run, and each joins the other's transfer.
  async::Task<void> recruit(Transfer& transfer);

  // Copies of this version in the own store under other layouts.
  async::Task<Result<void>> add_local();
  // A fallback directory that was not read yet.
  bool has_fallback() const { return !context_.request.fallback.empty() && !fallback_used_; }
  // Learns the checkpoint from the directory if no source could give it.
  async::Task<Result<void>> add_fallback();
  // From now on no source is asked for this layout.
  void know_layout(std::shared_ptr<const Layout> layout);

  // Outside of a transfer.
  void lose(ActiveSource& source, const Error& cause);
  // After a transfer: which of its sources may serve the next one. True: some grants had run out.
  bool judge();
  void forget_lost();
  void close();
  // How long a source may take for a page of metadata: one that does not answer leaves time for
  // the others to be asked. `turn`: of the fetch, to note its progress.
  SourcePeer::Paging paging(FetchTurns::Turn* turn = nullptr);

 private:
  // One life of a node, and one of its layouts.
  using PeerKey = std::pair<Incarnation, Digest>;
  std::vector<proto::Source> to_dial(const std::function<bool(const PeerKey&)>& may_dial) const;
  bool has_room() const { return table_->size() < transport::kMaxSources; }
  async::Task<void> ask_then_dial();
  async::Task<void> dial_listed();
  async::Task<void> dial(proto::Source record);
  async::Task<void> learn_layouts();
  async::Task<Result<void>> learn_layout_of(ActiveSource& source);
  bool find_layout(const Digest& digest);
  async::Task<void> recruit_peer(proto::Source record, Transfer& transfer);
  async::Task<Result<void>> prepare_join(std::shared_ptr<const Layout> layout, bool proves_parts,
                                         Transfer& transfer);
  void take_news(SwarmFollower* follower);

  PullContext& context_;
  const std::shared_ptr<SourceTable> table_ = std::make_shared<SourceTable>();
  SourceFaults faults_;
  std::map<Digest, std::shared_ptr<const Layout>> layouts_;
  // Dialled since the last connect() or look() began.
  std::set<PeerKey> dialled_;
  // When a peer was last dialled while a transfer runs.
  std::map<PeerKey, TimePoint> recruited_;
  bool fallback_used_ = false;
  bool queue_shown_ = false;
};

}  // namespace rekindle::pull
