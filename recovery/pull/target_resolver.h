#pragma once

#include <memory>
#include <string>

#include "recovery/pull/pull_context.h"
#include "recovery/pull/source_pool.h"
#include "recovery/pull/wanted.h"
#include "src/async/task.h"
#include "src/store/segment_store.h"

namespace rekindle::pull {

// Resolves the target of a pull (PullTarget): the version and its root, its checkpoint, and the
// wanted boxes. It asks the coordinator or the peers of --from first. If it cannot reach them, it
// uses copies in the own store or the fallback directory. Control thread only.
class TargetResolver {
 public:
  TargetResolver(PullContext& context, SourcePool& sources, const WantedSpec& wanted);

  // The version and its root. kCorrupt: the request names another root.
  async::Task<Result<void>> resolve();
  // Its checkpoint, the wanted boxes and their layout here.
  async::Task<Result<void>> find_wanted();

 private:
  bool has_been_asked(const Error& answer) const;
  void take_from_store();
  async::Task<Result<void>> take_from_fallback();
  // The root that was asked for, and a signature of it that is trusted.
  Result<void> check_root();
  // Exactly the boxes of a copy that is set aside.
  Result<void> take_layout(const store::SetAside& copy);
  async::Task<Result<void>> learn_checkpoint();
  bool find_checkpoint();
  async::Task<Result<void>> ask_for_checkpoint();
  // Verified. `turn` notes the progress.
  async::Task<Result<std::shared_ptr<const Checkpoint>>> fetch_checkpoint(
      std::shared_ptr<SourcePeer> peer, FetchTurns::Turn* turn);
  // Of the tensor that is config.json. Verified.
  async::Task<Result<std::string>> fetch_config(std::shared_ptr<SourcePeer> peer,
                                                TensorIndex tensor);
  async::Task<Result<std::string>> read_config();

  PullContext& context_;
  SourcePool& sources_;
  const WantedSpec& wanted_;
  PullTarget& target_;
};

}  // namespace rekindle::pull
