#include "tools/cli/explanation.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "recovery/trace/tracer.h"
#include "src/base/median.h"
#include "src/base/units.h"
#include "tools/cli/trace_query.h"

namespace rekindle::cli {
namespace {

using trace::Span;
using Nanoseconds = std::chrono::nanoseconds;

// A source below this part of the median rate of the others is slow.
constexpr double kSlow = 0.6;
// A source that reaches this part of its cap is held back by it.
constexpr double kAtCap = 0.8;
// A phase with at least this share of the time bounds the operation.
constexpr double kBounds = 0.5;
// A rank that took this much longer than the median of the others is slow.
constexpr double kSlowRank = 1.5;
// A wait, or a delay, of this share of the time is told.
constexpr double kWaited = 0.1;
// A joint publication, and the span that the coordinator leaves at its beginning.
constexpr std::string_view kJoint = "publication";
constexpr std::string_view kRosterComplete = "roster_complete";
// So many operations are named beside the one that is explained.
constexpr std::size_t kMostOthers = 8;

double in_seconds(Nanoseconds time) { return std::chrono::duration<double>(time).count(); }

std::string time_text(Nanoseconds time) {
  const double s = in_seconds(time);
  return s < 1 ? fmt::format("{:.1f} ms", s * 1000) : fmt::format("{:.2f} s", s);
}

std::string bytes_text(std::int64_t bytes) {
  return format_bytes(static_cast<std::uint64_t>(std::max<std::int64_t>(bytes, 0)));
}

double share(Nanoseconds part, Nanoseconds whole) {
  return whole.count() <= 0 ? 0 : in_seconds(part) / in_seconds(whole);
}

std::string text_of(const Span& span, std::string_view key, const std::string& otherwise) {
  const std::string* text = span.text(key);
  return text == nullptr || text->empty() ? otherwise : *text;
}

// The spans of one operation, as a tree.
class Tree {
 public:
  explicit Tree(const std::vector<Span>& spans) {
    for (const Span& span : spans) children_[{span.context.trace, span.parent}].push_back(&span);
  }
  std::vector<const Span*> children(const Span& parent) const {
    const auto found = children_.find(parent.context);
    return found == children_.end() ? std::vector<const Span*>() : found->second;
  }
  // All spans of this name below `top`.
  std::vector<const Span*> below(const Span& top, std::string_view name) const {
    std::vector<const Span*> found;
    std::vector<const Span*> open = children(top);
    std::set<trace::Context> seen;
    while (!open.empty()) {
      const Span* span = open.back();
      open.pop_back();
      if (!seen.insert(span->context).second) continue;
      if (span->name == name) found.push_back(span);
      for (const Span* child : children(*span)) open.push_back(child);
    }
    std::ranges::sort(found, {}, &Span::start);
    return found;
  }

 private:
  std::map<trace::Context, std::vector<const Span*>> children_;
};

struct PhaseTime {
  std::string name;
  Nanoseconds took{};
};

// By name, the longest first. A phase that came again counts once.
std::vector<PhaseTime> phases_of(const std::vector<const Span*>& spans) {
  std::vector<PhaseTime> phases;
  for (const Span* span : spans) {
    auto known = std::ranges::find(phases, span->name, &PhaseTime::name);
    if (known == phases.end()) known = phases.insert(phases.end(), {span->name, {}});
    known->took += span->duration;
  }
  std::ranges::stable_sort(phases, std::greater(), &PhaseTime::took);
  return phases;
}

Finding phases_finding(const std::vector<PhaseTime>& phases, Nanoseconds whole) {
  std::string text = "The time went to";
  for (std::size_t i = 0; i < phases.size(); ++i) {
    text += fmt::format("{} {} {} ({:.0f} %)", i == 0 ? "" : ",", phases[i].name,
                        time_text(phases[i].took), 100 * share(phases[i].took, whole));
  }
  return {"phases", text + ".", ""};
}

// The time in which any of the spans ran: they may overlap.
Nanoseconds time_in(std::vector<const Span*> spans) {
  std::ranges::sort(spans, {}, &Span::start);
  Nanoseconds together{};
  Nanoseconds until{};
  for (const Span* span : spans) {
    together += std::max(Nanoseconds{}, span->end() - std::max(until, span->start));
    until = std::max(until, span->end());
  }
  return together;
}

// What one source brought in all transfers of a pull.
struct SourceWork {
  std::string name;
  std::string transport;
  std::int64_t bytes = 0;
  double rate = 0;  // bytes per second
  std::int64_t cap = 0;
  std::int64_t failed_slices = 0;
  std::string lost;  // why

  bool at_cap() const { return cap > 0 && rate >= kAtCap * static_cast<double>(cap); }
};

std::vector<SourceWork> sources_of(const std::vector<const Span*>& spans) {
  std::map<std::string, SourceWork> sources;
  std::map<std::string, Nanoseconds> busy;
  for (const Span* span : spans) {
    const std::string name = text_of(*span, trace::kSource, "an unnamed source");
    SourceWork& work = sources[name];
    work.name = name;
    work.transport = text_of(*span, "rekindle.transport", work.transport);
    work.bytes += span->number("rekindle.bytes");
    work.cap = std::max(work.cap, span->number("rekindle.cap_bytes_per_second"));
    work.failed_slices += span->number("rekindle.failed_slices");
    if (!span->error.empty()) work.lost = span->error;
    busy[name] += span->duration;
  }
  std::vector<SourceWork> list;
  for (auto& [name, work] : sources) {
    const double s = in_seconds(busy[name]);
    work.rate = s > 0 ? static_cast<double>(work.bytes) / s : 0;
    list.push_back(std::move(work));
  }
  std::ranges::stable_sort(list, std::greater(), &SourceWork::bytes);
  return list;
}

std::string pull_outcome(const Span& pull) {
  const std::string what =
      fmt::format("The pull of {} to {}", text_of(pull, trace::kVersion, "a version"), pull.node);
  const std::string took = time_text(pull.duration);
  if (!pull.error.empty()) return fmt::format("{} failed after {}: {}", what, took, pull.error);
  const std::int64_t fetched = pull.number("rekindle.fetched_bytes");
  std::string text =
      fmt::format("{} took {}: {}", what, took, bytes_text(pull.number("rekindle.bytes")));
  const double s = in_seconds(pull.duration);
  if (s > 0) {
    text += fmt::format(", of which {} were fetched ({})", bytes_text(fetched),
                        format_rate(static_cast<double>(fetched) / s));
  }
  return text + ".";
}

class PullExplanation {
 public:
  PullExplanation(const Span& pull, const Tree& tree)
      : pull_(pull),
        tree_(tree),
        phases_(phases_of(own_children(pull, tree))),
        sources_(sources_of(tree.below(pull, "source"))) {}

  std::vector<Finding> make() {
    add("outcome", pull_outcome(pull_));
    if (!phases_.empty()) findings_.push_back(phases_finding(phases_, pull_.duration));
    sources();
    slow_sources();
    slow_rails();
    waits();
    failures();
    repeated();
    bound();
    return std::move(findings_);
  }

 private:
  // Without what other processes did for it.
  static std::vector<const Span*> own_children(const Span& pull, const Tree& tree) {
    auto spans = tree.children(pull);
    std::erase_if(spans, [&](const Span* span) {
      return span->service != pull.service || span->node != pull.node;
    });
    return spans;
  }
  void add(std::string kind, std::string text, std::string advice = "") {
    findings_.push_back({std::move(kind), std::move(text), std::move(advice)});
  }

  void sources() {
    if (sources_.empty()) return;
    std::string text = "It read";
    for (std::size_t i = 0; i < sources_.size(); ++i) {
      const SourceWork& source = sources_[i];
      text +=
          fmt::format("{} {} from {} over {} at {}", i == 0 ? "" : ",", bytes_text(source.bytes),
                      source.name, source.transport, format_rate(source.rate));
    }
    add("sources", text + ".");
  }

  void slow_sources() {
    for (const SourceWork& source : sources_) {
      // It was too quick to be measured.
      if (source.bytes > 0 && source.rate <= 0) continue;
      std::vector<double> others;
      for (const SourceWork& other : sources_) {
        if (&other != &source) others.push_back(other.rate);
      }
      const double usual = median(others);
      const bool slow = !others.empty() && source.rate < kSlow * usual;
      // Its slices were taken from it before the first one had arrived.
      const bool nothing = source.bytes == 0;
      const bool capped = source.at_cap() || (slow && source.cap > 0 &&
                                              static_cast<double>(source.cap) < kSlow * usual);
      if (!slow && !capped) continue;
      std::string text = fmt::format("Source {} sent {}", source.name,
                                     nothing ? "nothing in time" : format_rate(source.rate));
      if (slow && nothing) {
        text += fmt::format("; the others sent {}", format_rate(usual));
      } else if (slow) {
        text += fmt::format(", {:.1f} times slower than the others ({})", usual / source.rate,
                            format_rate(usual));
      }
      if (capped) {
        add(slow ? "slow_source" : "capped",
            fmt::format("{}. It may send this pull {} at most.", text,
                        format_rate(static_cast<double>(source.cap))),
            fmt::format("Raise --max-rate of the agent {}, if its network has room. A copy that "
                        "the coordinator ordered has --recopy-rate as its cap.",
                        source.name));
      } else {
        add("slow_source", text + ".",
            fmt::format("Look at the load and the link of {}: `rekindle topo` and `rekindle bench "
                        "transfer` there.",
                        source.name));
      }
    }
  }

  void slow_rails() {
    for (const Span* source : tree_.below(pull_, "source")) {
      const auto rails = tree_.below(*source, "rail");
      for (const Span* rail : rails) {
        std::vector<double> others;
        for (const Span* other : rails) {
          if (other != rail) others.push_back(static_cast<double>(other->number("rekindle.bytes")));
        }
        const auto bytes = static_cast<double>(rail->number("rekindle.bytes"));
        const double usual = median(others);
        if (others.empty() || bytes >= kSlow * usual) continue;
        add("slow_rail",
            fmt::format("Of {}, rail {} brought {}; the others brought {} each.",
                        text_of(*source, trace::kSource, "a source"),
                        text_of(*rail, trace::kRail, "?"),
                        bytes_text(rail->number("rekindle.bytes")),
                        bytes_text(static_cast<std::int64_t>(usual))),
            "Look at the port and its errors with `rekindle topo` and `rekindle doctor`.");
      }
    }
  }

  void waits() {
    struct Reason {
      std::string_view what, text, advice;
    };
    static constexpr Reason kReasons[]{
        {"queue", "in the queue, because every source had its number of pullers",
         "Keep more copies (--replicas), or raise the coordinator's --max-pullers."},
        {"source", "for a source, because none had the missing bytes",
         "See in `rekindle status` who holds the version, and keep more copies (--replicas)."},
        {"holders", "for the holders, which had yet to verify their copies", ""},
        {"host", "for another pull of this host, which fetched the same tables", ""},
        {"hold", "while a broadcast to the GPUs might bring the bytes", ""},
    };
    for (const Reason& reason : kReasons) {
      Nanoseconds waited{};
      for (const Span* wait : tree_.below(pull_, "wait")) {
        if (text_of(*wait, trace::kWait, "") == reason.what) waited += wait->duration;
      }
      if (waited.count() == 0) continue;
      add("wait", fmt::format("It waited {} {}.", time_text(waited), reason.text),
          std::string(reason.advice));
    }
  }

  void failures() {
    for (const Span* handshake : tree_.below(pull_, "handshake")) {
      if (handshake->error.empty()) continue;
      add("failure",
          fmt::format("Connecting {} failed: {}.", text_of(*handshake, trace::kSource, "a source"),
                      handshake->error));
    }
    for (const SourceWork& source : sources_) {
      if (source.lost.empty()) continue;
      const bool others =
          pull_.error.empty() && std::ranges::any_of(sources_, [&](const auto& other) {
            return &other != &source && other.bytes > 0;
          });
      add("failure", fmt::format("Source {} was lost: {}.{}", source.name, source.lost,
                                 others ? " The others brought the rest." : ""));
    }
  }

  void repeated() {
    std::int64_t retried = 0;
    std::int64_t stolen = 0;
    for (const Span* transfer : tree_.below(pull_, "transfer")) {
      retried += transfer->number("rekindle.retried_slices");
      stolen += transfer->number("rekindle.stolen_slices");
    }
    const std::int64_t wrong = pull_.number("rekindle.refetched_bytes");
    // Stolen slices are asked for again, too.
    if (retried > stolen) {
      add("repeated",
          fmt::format("{} slice(s) failed and were asked for again.", retried - stolen));
    }
    if (stolen > 0) {
      add("repeated",
          fmt::format("{} slice(s) were taken from a slow source and read from another one.",
                      stolen));
    }
    if (wrong > 0) {
      add("repeated", fmt::format("{} were wrong and were fetched again.", bytes_text(wrong)),
          "Check the copies of the sources with `rekindle verify`.");
    }
  }

  void bound() {
    if (phases_.empty() || share(phases_[0].took, pull_.duration) < kBounds) return;
    const std::string& name = phases_[0].name;
    const bool all_capped = !sources_.empty() && std::ranges::all_of(sources_, &SourceWork::at_cap);
    if (name == "transfer" && all_capped) {
      return add("bound", "The caps of its sources bounded the pull: each sent as much as it may.",
                 "Raise --max-rate of the agents, or keep more copies (--replicas).");
    }
    static const std::map<std::string_view, std::string_view> kAdvice{
        {"resolve", "The coordinator or the copies were not ready: see `rekindle status`."},
        {"plan",
         "Metadata and planning took the time: a pull of the same thing on this host "
         "finds them cached."},
        {"allocate", "Hold memory ready with the agent's --reserve, on huge pages."},
        {"connect",
         "Registration and connections took the time: --reserve registers memory "
         "before a pull."},
        {"transfer", ""},
        {"verify", "The CPUs of this host digested: see `rekindle bench digest`."},
        {"commit", ""},
    };
    const auto advice = kAdvice.find(name);
    add("bound", fmt::format("The phase {} bounded the pull.", name),
        std::string(advice == kAdvice.end() ? "" : advice->second));
  }

  const Span& pull_;
  const Tree& tree_;
  const std::vector<PhaseTime> phases_;
  const std::vector<SourceWork> sources_;
  std::vector<Finding> findings_;
};

// "gathering" waits for workers, "meeting" for communicators.
constexpr std::string_view kGathering = "gathering";

// A rank of an update, with its phases.
struct UpdatedRank {
  const Span* span = nullptr;
  std::string name;
  std::vector<const Span*> phases = {};
  // In its phases.
  Nanoseconds busy{};
  // The one that ended last before it waited for the others. nullptr: none.
  const Span* last = nullptr;
};

// In this phase a rank waits until all of them have committed.
constexpr std::string_view kResume = "resume";

std::vector<UpdatedRank> ranks_of(const std::vector<const Span*>& spans, const Tree& tree) {
  std::vector<UpdatedRank> ranks;
  for (const Span* span : spans) {
    UpdatedRank rank{span, text_of(*span, trace::kRank, "a rank"), tree.children(*span)};
    std::vector<const Span*> working;
    for (const Span* phase : rank.phases) {
      if (phase->name != kResume) working.push_back(phase);
    }
    rank.busy = rank.phases.empty() ? span->duration : time_in(working);
    for (const Span* phase : working) {
      if (rank.last == nullptr || phase->end() > rank.last->end()) rank.last = phase;
    }
    ranks.push_back(std::move(rank));
  }
  return ranks;
}

std::vector<Finding> slow_ranks(const std::vector<UpdatedRank>& ranks) {
  std::vector<Finding> findings;
  for (const UpdatedRank& rank : ranks) {
    if (!rank.span->error.empty()) {
      findings.push_back({"failure", fmt::format("{}: {}.", rank.name, rank.span->error), ""});
    }
    std::vector<double> others;
    for (const UpdatedRank& other : ranks) {
      if (&other != &rank && other.span->error.empty()) others.push_back(in_seconds(other.busy));
    }
    const double usual = median(others);
    if (usual <= 0 || in_seconds(rank.busy) <= kSlowRank * usual) continue;
    const auto own = phases_of(rank.phases);
    std::string text =
        fmt::format("{} took {}, {:.1f} times as long as the others ({:.2f} s)", rank.name,
                    time_text(rank.busy), in_seconds(rank.busy) / usual, usual);
    if (!own.empty())
      text += fmt::format("; most of it was {} ({})", own[0].name, time_text(own[0].took));
    findings.push_back(
        {"slow_rank", text + ".", "Look at that worker's GPU, its host's load and its PCIe link."});
  }
  return findings;
}

// The rank whose last phase ended long after those of the others. Ranks that have not said when
// their phases began tell nothing about it.
std::optional<Finding> waited_for(const std::vector<UpdatedRank>& ranks, Nanoseconds whole) {
  std::vector<const UpdatedRank*> placed;
  for (const UpdatedRank& rank : ranks) {
    const bool known = rank.last != nullptr && rank.span->text(trace::kPhaseStarts) == nullptr;
    if (known && rank.span->error.empty()) placed.push_back(&rank);
  }
  if (placed.size() < 2) return std::nullopt;
  const UpdatedRank& last = **std::ranges::max_element(
      placed, {}, [](const UpdatedRank* rank) { return rank->last->end(); });
  std::vector<double> ends;
  std::vector<double> starts;
  for (const UpdatedRank* rank : placed) {
    if (rank == &last) continue;
    ends.push_back(in_seconds(last.last->end() - rank->last->end()));
    for (const Span* phase : rank->phases) {
      if (phase->name == last.last->name) {
        starts.push_back(in_seconds(last.last->start - phase->start));
      }
    }
  }
  const double late = median(ends);
  if (late < kWaited * in_seconds(whole)) return std::nullopt;
  std::string text = fmt::format(
      "The update waited for {}: its phase {} ended {:.2f} s after the others were done", last.name,
      last.last->name, late);
  const double began = median(starts);
  if (!starts.empty() && began > 0) text += fmt::format(", and began {:.2f} s later", began);
  return Finding{"waited_for", text + ".", ""};
}

std::vector<Finding> explain_update(const Span& update, const Tree& tree) {
  std::vector<const Span*> phases;
  std::vector<const Span*> ranks;
  for (const Span* child : tree.children(update)) {
    if (child->name == "rank")
      ranks.push_back(child);
    else if (child->node == update.node)
      phases.push_back(child);
  }
  std::vector<Finding> findings;
  const auto failed = std::ranges::count_if(
      ranks, [](const Span* rank) { return text_of(*rank, "rekindle.state", "") != "ready"; });
  findings.push_back(
      {"outcome",
       fmt::format("The update to {} took {} for {} ranks; {} of them did not get it.",
                   text_of(update, trace::kSubject, "a version"), time_text(update.duration),
                   ranks.size(), failed),
       ""});
  const auto times = phases_of(phases);
  if (!times.empty()) findings.push_back(phases_finding(times, update.duration));
  const auto updated = ranks_of(ranks, tree);
  std::ranges::move(slow_ranks(updated), std::back_inserter(findings));
  if (auto waited = waited_for(updated, update.duration)) findings.push_back(std::move(*waited));
  if (!times.empty() && share(times[0].took, update.duration) >= kBounds) {
    findings.push_back({"bound", fmt::format("The phase {} bounded the update.", times[0].name),
                        times[0].name == kGathering
                            ? "Workers attached late: tell the round how many to expect, or "
                              "shorten --gather."
                            : ""});
  }
  return findings;
}

// --- publications

// Of one agent, or of one rank, in a joint publication.
struct Publisher {
  std::string name;
  std::string node;
  std::string error;
  std::map<std::string, Nanoseconds> phases = {};
};

std::vector<Publisher> publishers_of(const Span& publication, const Tree& tree,
                                     std::string_view kind) {
  std::vector<Publisher> publishers;
  for (const Span* span : tree.children(publication)) {
    if (span->name != kind) continue;
    Publisher one{text_of(*span, trace::kRank, span->node), span->node, span->error};
    for (const Span* phase : tree.children(*span)) one.phases[phase->name] += phase->duration;
    publishers.push_back(std::move(one));
  }
  std::ranges::stable_sort(publishers, {}, &Publisher::name);
  return publishers;
}

// Compares how long each took in a phase. Waits for others belong to no phase that is compared.
class PhaseOfMany {
 public:
  PhaseOfMany(const std::vector<Publisher>& all, const std::string& phase) {
    for (const Publisher& one : all) {
      const auto took = one.phases.find(phase);
      if (took != one.phases.end()) times_.push_back({&one, took->second});
    }
    std::ranges::stable_sort(times_, {}, &Time::took);
  }
  // Fewer cannot be compared.
  bool compares() const { return times_.size() >= 2; }
  const Publisher& shortest() const { return *times_.front().of; }
  const Publisher& longest() const { return *times_.back().of; }
  Nanoseconds least() const { return times_.front().took; }
  Nanoseconds most() const { return times_.back().took; }
  // Of the others than the shortest, or the longest one, in seconds.
  double usual_beside_shortest() const { return usual(1, times_.size()); }
  double usual_beside_longest() const { return usual(0, times_.size() - 1); }

 private:
  struct Time {
    const Publisher* of;
    Nanoseconds took;
  };
  double usual(std::size_t from, std::size_t to) const {
    std::vector<double> some;
    for (std::size_t i = from; i < to; ++i) some.push_back(in_seconds(times_[i].took));
    return median(some);
  }
  std::vector<Time> times_;
};

// The one that took much longer in this phase than the others, if the publication felt it.
std::optional<Finding> slow_publisher(const std::string& kind, const PhaseOfMany& times,
                                      const std::string& did, const std::string& advice,
                                      Nanoseconds whole) {
  if (!times.compares()) return std::nullopt;
  const double most = in_seconds(times.most());
  const double usual = times.usual_beside_longest();
  if (most <= kSlowRank * usual || most - usual < kWaited * in_seconds(whole)) return std::nullopt;
  return Finding{kind,
                 fmt::format("{} {} for {}; the others took {:.2f} s.", times.longest().name, did,
                             time_text(times.most()), usual),
                 advice};
}

// The rank that declared last. The others were gathered before it, so it waited least.
std::optional<Finding> late_rank(const PhaseOfMany& gather, Nanoseconds whole) {
  if (!gather.compares()) return std::nullopt;
  const double waited = gather.usual_beside_shortest() - in_seconds(gather.least());
  if (waited < kWaited * in_seconds(whole)) return std::nullopt;
  return Finding{"late_rank",
                 fmt::format("{} declared last: the others waited {:.2f} s for it.",
                             gather.shortest().name, waited),
                 "See what it did before rekindle.publisher()."};
}

std::vector<Finding> explain_joint(const Span& publication, const Tree& tree) {
  const auto shares = publishers_of(publication, tree, "share");
  const auto ranks = publishers_of(publication, tree, "rank");
  const Nanoseconds whole = publication.duration;
  std::vector<Finding> findings;
  const auto add = [&findings](std::optional<Finding> finding) {
    if (finding) findings.push_back(std::move(*finding));
  };
  add(slow_publisher("slow_rank", {ranks, "write"}, "wrote",
                     "Look at that worker's GPU, its host's load and its PCIe link.", whole));
  add(late_rank({ranks, "gather"}, whole));
  add(slow_publisher("slow_host", {shares, "digest"}, "digested",
                     "The CPUs of that host digested: see `rekindle bench digest` there.", whole));
  add(slow_publisher("slow_host", {shares, "finish"}, "finished the tiles that hosts share",
                     "It waited for their pieces: look at its links with `rekindle topo`.", whole));
  add(slow_publisher("slow_host", {shares, "commit"}, "committed its copy",
                     "Look at the load of that host and at its store.", whole));
  for (const Publisher& host : shares) {
    if (host.error.empty() || host.error == publication.error) continue;
    findings.push_back({"failure", fmt::format("{}: {}.", host.name, host.error), ""});
  }
  return findings;
}

// The phases of a publication: its own, or those of the share of a joint publication's lead.
std::vector<const Span*> phases_of_publication(const Span& publication, const Tree& tree) {
  if (publication.name != kJoint) return tree.children(publication);
  for (const Span* child : tree.children(publication)) {
    if (child->name == "share" && child->node == publication.node) return tree.children(*child);
  }
  return {};
}

std::string publication_outcome(const Span& publication, const Tree& tree) {
  const bool joint = publication.name == kJoint;
  const std::string what = fmt::format("The {}publication of {}", joint ? "joint " : "",
                                       text_of(publication, trace::kSubject, "a version"));
  const std::string took = time_text(publication.duration);
  if (!publication.error.empty()) {
    return fmt::format("{} failed after {}: {}.", what, took, publication.error);
  }
  if (!joint) {
    return fmt::format("{} from {} took {}: {}.", what, publication.node, took,
                       bytes_text(publication.number("rekindle.bytes")));
  }
  std::string text =
      fmt::format("{} took {} on {} host(s)", what, took, publication.number("rekindle.hosts"));
  const auto shares = publishers_of(publication, tree, "share").size();
  const auto missing = publication.number("rekindle.hosts") - static_cast<std::int64_t>(shares);
  if (missing > 0) text += fmt::format(", of which {} left no spans here", missing);
  return text + ".";
}

std::vector<Finding> explain_publication(const Span& publication, const Tree& tree) {
  if (publication.name == kRosterComplete) {
    return {{"outcome",
             fmt::format("The joint publication of {} has begun on {} host(s), and its lead has "
                         "left no span of it.",
                         text_of(publication, trace::kSubject, "a version"),
                         publication.number("rekindle.hosts")),
             "It has not ended yet, or the agent of its lead is away or has started anew."}};
  }
  std::vector<Finding> findings{{"outcome", publication_outcome(publication, tree), ""}};
  const auto times = phases_of(phases_of_publication(publication, tree));
  if (!times.empty()) findings.push_back(phases_finding(times, publication.duration));
  std::ranges::move(explain_joint(publication, tree), std::back_inserter(findings));
  if (times.empty() || share(times[0].took, publication.duration) < kBounds) return findings;
  static const std::map<std::string_view, std::string_view> kAdvice{
      {"gather", "Ranks declared late, or at different times."},
      {"copy", "The file was read and copied: look at its disk, or publish from memory."},
      {"write", "The ranks wrote their tensors: their GPUs and PCIe links took the time."},
      {"digest", "The CPUs digested: see `rekindle bench digest`."},
      {"finish", "Hosts that share tiles sent pieces to each other: let ranks write whole tiles."},
      {"claim", "It waited for the other hosts, or for the coordinator."},
      {"confirm", "It waited for the other hosts, or for the coordinator."},
  };
  const auto advice = kAdvice.find(times[0].name);
  findings.push_back({"bound", fmt::format("The phase {} bounded the publication.", times[0].name),
                      std::string(advice == kAdvice.end() ? "" : advice->second)});
  return findings;
}

Finding recovery_outcome(const Span& recovery) {
  const std::string what = fmt::format("Rank {} of {}", text_of(recovery, trace::kRank, "0"),
                                       text_of(recovery, trace::kSubject, "?"));
  const std::string version = text_of(recovery, trace::kVersion, "its version");
  const std::string took = time_text(recovery.duration);
  if (!recovery.error.empty()) {
    return {"outcome",
            fmt::format("{} did not get {}, after {}: {}.", what, version, took, recovery.error),
            ""};
  }
  return {"outcome",
          fmt::format("{} was served {} again in {}, from {}.", what, version, took,
                      text_of(recovery, "rekindle.rung", "this host")),
          ""};
}

std::vector<Finding> explain_recovery(const Span& recovery, const Tree& tree) {
  std::vector<const Span*> phases;
  std::vector<Finding> findings{recovery_outcome(recovery)};
  for (const Span* child : tree.children(recovery)) {
    if (child->name != "pull") {
      phases.push_back(child);
      continue;
    }
    const std::string subject = text_of(*child, trace::kSubject, child->context.trace.hex());
    findings.push_back({"pull", pull_outcome(*child),
                        fmt::format("More of it: `rekindle explain pull {}`.", subject)});
  }
  if (const std::string* const other = recovery.text(trace::kPullTrace)) {
    findings.push_back({"pull", "Its bytes came with the pull of another rank.",
                        fmt::format("More of it: `rekindle explain pull {}`.", *other)});
  }
  const auto times = phases_of(phases);
  if (times.empty()) return findings;
  findings.push_back(phases_finding(times, recovery.duration));
  if (share(times[0].took, recovery.duration) < kBounds) return findings;
  static const std::map<std::string_view, std::string_view> kAdvice{
      {"detect", "A core dump delays the death of a process: see docs/reference/failures.md."},
      {"restart",
       "Its process ended late, or started slowly: its own start, and the pauses of "
       "`rekindle run`."},
      {"plan", "The version had to be chosen or planned: see `rekindle status`."},
      {"register", "Hold registered memory ready with --reserve."},
      {"wire",
       "The bytes were not on this host: `rekindle explain pull MODEL` says how they came."},
      {"install",
       "The worker loaded its weights: its GPU, its PCIe link or its engine took the time."},
      {"ready", "It waited for the other ranks of its instance."},
  };
  const auto advice = kAdvice.find(times[0].name);
  findings.push_back({"bound", fmt::format("The phase {} bounded the recovery.", times[0].name),
                      std::string(advice == kAdvice.end() ? "" : advice->second)});
  return findings;
}

// "qwen3@41 on b (6f2c…)": with the word that names it alone, if there is one.
std::string name_of(const Span& span) {
  const std::string subject = text_of(span, trace::kSubject, "");
  std::string name = text_of(span, trace::kVersion, subject.empty() ? "a version" : subject);
  if (const std::string* const rank = span.text(trace::kRank)) name += " rank " + *rank;
  name += " on " + span.node;
  if (!subject.empty() && !name.starts_with(subject)) name += " (" + subject + ")";
  return name;
}

// `fitting`: the newest first.
Finding which_finding(const std::string& operation, const std::vector<const Span*>& fitting) {
  std::string text =
      fmt::format("{} operations fit; this is the newest {}, {}. The others:", fitting.size(),
                  operation, name_of(*fitting[0]));
  for (std::size_t i = 1; i < std::min(fitting.size(), kMostOthers + 1); ++i) {
    text += fmt::format("{} {}", i == 1 ? "" : ",", name_of(*fitting[i]));
  }
  if (fitting.size() > kMostOthers + 1) {
    text += fmt::format(" and {} more", fitting.size() - kMostOthers - 1);
  }
  return {"which", text + ".", ""};
}

}  // namespace

std::vector<Finding> explain(const std::string& operation, const std::string& subject,
                             const std::vector<Span>& spans) {
  std::vector<const Span*> fitting;
  for (const Span& span : spans) {
    if (is_wanted(span, operation, subject)) fitting.push_back(&span);
  }
  // A joint publication may be known by its beginning only, when its lead does not answer.
  const auto is_beginning = [](const Span* span) { return span->name == kRosterComplete; };
  if (!std::ranges::all_of(fitting, is_beginning)) std::erase_if(fitting, is_beginning);
  if (fitting.empty()) return {};
  std::ranges::stable_sort(fitting, std::greater(), &Span::end);
  const Span& newest = *fitting.front();
  const Tree tree(spans);
  std::vector<Finding> findings;
  if (fitting.size() > 1) findings.push_back(which_finding(operation, fitting));
  auto own = operation == "pull"      ? PullExplanation(newest, tree).make()
             : operation == "update"  ? explain_update(newest, tree)
             : operation == "publish" ? explain_publication(newest, tree)
                                      : explain_recovery(newest, tree);
  std::ranges::move(own, std::back_inserter(findings));
  return findings;
}

}  // namespace rekindle::cli
