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
#include "src/async/staggered.h"
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
  // The first answer of the sources that `whom` admits. Each source has a head start before the
  // next; after a failure the next is asked at once. `failed` hears of every failure. kNotFound:
  // nobody is left to be asked. No dial may run meanwhile.
  template <typename T, typename Whom, typename Fetch, typename Failed>
  async::Task<Result<T>> ask(const Whom& whom, const Fetch& fetch, const Failed& failed) {
    std::vector<ActiveSource*> asked = able_to_tell();
    std::erase_if(asked, [&](const ActiveSource* source) { return !whom(*source); });
    std::vector<async::Task<Result<T>>> calls;
    for (const ActiveSource* source : asked) calls.push_back(fetch(*source));
    auto asking = async::staggered<T>(std::move(calls), head_start());
    auto first = co_await std::move(asking);
    Error why{ErrorCode::kNotFound, "no source can be reached"};
    for (std::size_t i = 0; i < asked.size(); ++i) {
      if (!first.errors[i]) continue;
      why = *first.errors[i];
      if (why.code() == ErrorCode::kTimeout) ++timeouts_[asked[i]->name];
      failed(*asked[i], why);
    }
    if (!first.value) co_return fail(std::move(why));
    quickest_ = asked[first.winner]->name;
    co_return std::move(*first.value);
  }
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
  async::Task<Result<std::shared_ptr<const Layout>>> fetch_layout(std::shared_ptr<SourcePeer> peer,
                                                                  Digest digest,
                                                                  FetchTurns::Turn* turn);
  // The connected sources that may be asked, in the order in which they are.
  std::vector<ActiveSource*> able_to_tell();
  // Larger metadata takes longer.
  Duration head_start() const;
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
  // How often a source was too slow. Each page that arrives renews the patience of the pull, so a
  // source that only drips would be asked for ever.
  std::map<std::string, int> timeouts_;
  // The source that has told something last. It is asked first.
  std::string quickest_;
  bool fallback_used_ = false;
  bool queue_shown_ = false;
};

}  // namespace rekindle::pull
