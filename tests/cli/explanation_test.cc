#include "tools/cli/explanation.h"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "recovery/trace/tracer.h"
#include "tools/cli/trace_query.h"

namespace rekindle::cli {
namespace {

using namespace std::chrono_literals;
using trace::Attribute;
using trace::Span;

constexpr std::int64_t kMega = 1'000'000;

// Spans of one trace, as agent b leaves them.
class Spans {
 public:
  Span& add(const std::string& name, std::chrono::milliseconds from, std::chrono::milliseconds to,
            const Span* parent = nullptr) {
    Span span;
    span.context = {trace_, trace::SpanId::random()};
    if (parent != nullptr) span.parent = parent->context.span;
    span.name = name;
    span.service = "agent";
    span.node = "b";
    span.start = 1'700'000'000s + from;
    span.duration = to - from;
    spans_.push_back(std::move(span));
    return spans_.back();
  }
  Span source(const Span& transfer, const std::string& name, std::int64_t megabytes,
              std::chrono::milliseconds took, std::int64_t cap = 0) {
    Span& span = add("source", 100ms, 100ms + took, &transfer);
    span.attributes = {{std::string(trace::kSource), name},
                       {"rekindle.transport", std::string("tcp")},
                       {"rekindle.bytes", megabytes * kMega}};
    if (cap > 0) span.attributes.push_back({"rekindle.cap_bytes_per_second", cap * kMega});
    return span;
  }
  std::vector<Span> all() const { return {spans_.begin(), spans_.end()}; }
  std::vector<Finding> explained(const std::string& operation) const {
    return explain(operation, trace_.hex(), all());
  }

 private:
  const trace::TraceId trace_ = trace::TraceId::random();
  std::deque<Span> spans_;
};

class ExplainPull : public ::testing::Test {
 protected:
  ExplainPull() {
    Span& top = spans_.add("pull", 0ms, 1000ms);
    top.attributes = {{std::string(trace::kOperation), std::string("pull")},
                      {std::string(trace::kVersion), std::string("m@1")},
                      {"rekindle.bytes", 900 * kMega},
                      {"rekindle.fetched_bytes", 600 * kMega}};
    pull_ = top;
    transfer_ = spans_.add("transfer", 100ms, 1000ms, &pull_);
  }
  // The text and the advice of the findings of this kind, one a line.
  std::string said(const std::string& kind) const {
    std::string text;
    for (const Finding& finding : spans_.explained("pull")) {
      if (finding.kind == kind) text += finding.text + " " + finding.advice + "\n";
    }
    return text;
  }
  static void expect_in(const std::string& part, const std::string& text) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }

  Spans spans_;
  Span pull_;
  Span transfer_;
};

TEST_F(ExplainPull, BeginsWithTheOutcomeAndTheShareOfEachPhase) {
  spans_.add("plan", 0ms, 50ms, &pull_);
  spans_.add("plan", 50ms, 100ms, &pull_);
  // What another process did for it is no phase.
  spans_.add("coordinator_open_pull", 0ms, 90ms, &pull_).node = "coordinator";
  expect_in("The pull of m@1 to b took 1.00 s", said("outcome"));
  expect_in("(600.0 MB/s)", said("outcome"));
  EXPECT_EQ(said("phases"), "The time went to transfer 900.0 ms (90 %), plan 100.0 ms (10 %). \n");
  expect_in("The phase transfer bounded the pull.", said("bound"));
}

TEST_F(ExplainPull, SaysWhyItFailed) {
  Spans failed;
  Span& pull = failed.add("pull", 0ms, 5000ms);
  pull.attributes = {{std::string(trace::kOperation), std::string("pull")}};
  pull.error = "NO_SOURCE";
  const auto findings = failed.explained("pull");
  ASSERT_FALSE(findings.empty());
  expect_in("failed after 5.00 s: NO_SOURCE", findings[0].text);
}

TEST_F(ExplainPull, NamesASlowSourceAndHowSlowItWas) {
  spans_.source(transfer_, "a", 400, 500ms);
  spans_.source(transfer_, "c", 80, 800ms);
  spans_.source(transfer_, "d", 400, 500ms);
  EXPECT_EQ(said("capped"), "");
  const std::string slow = said("slow_source");
  expect_in("Source c sent 100.0 MB/s, 8.0 times slower than the others (800.0 MB/s).", slow);
  expect_in("`rekindle bench transfer`", slow);
  EXPECT_EQ(std::ranges::count(slow, '\n'), 1);
}

TEST_F(ExplainPull, SaysThatACapSlowsASource) {
  spans_.source(transfer_, "a", 400, 500ms);
  spans_.source(transfer_, "c", 80, 800ms, 100);
  const std::string slow = said("slow_source");
  expect_in("It may send this pull 100.0 MB/s at most.", slow);
  expect_in("--max-rate of the agent c", slow);
}

TEST_F(ExplainPull, SaysThatACappedSourceSentNothingInTime) {
  spans_.source(transfer_, "a", 400, 500ms);
  spans_.source(transfer_, "c", 0, 800ms, 10);
  expect_in("Source c sent nothing in time; the others sent 800.0 MB/s.", said("slow_source"));
  expect_in("--max-rate of the agent c", said("slow_source"));
}

TEST_F(ExplainPull, FindsThatTheCapsOfAllSourcesBoundIt) {
  spans_.source(transfer_, "a", 90, 900ms, 100);
  spans_.source(transfer_, "c", 90, 900ms, 100);
  EXPECT_EQ(said("slow_source"), "");
  expect_in("Source a sent 100.0 MB/s. It may send", said("capped"));
  expect_in("The caps of its sources bounded the pull", said("bound"));
}

TEST_F(ExplainPull, DoesNotCallEqualSourcesSlow) {
  spans_.source(transfer_, "a", 400, 500ms);
  spans_.source(transfer_, "c", 350, 500ms);
  EXPECT_EQ(said("slow_source") + said("capped") + said("slow_rail"), "");
  expect_in("from a over tcp at 800.0 MB/s", said("sources"));
}

TEST_F(ExplainPull, NamesASlowRail) {
  const Span source = spans_.source(transfer_, "a", 400, 500ms);
  for (const char* name : {"mlx5_0", "mlx5_1"}) {
    const bool slow = std::string(name) == "mlx5_1";
    spans_.add("rail", 100ms, 600ms, &source).attributes = {
        {"rekindle.rail", std::string(name)}, {"rekindle.bytes", (slow ? 30 : 370) * kMega}};
  }
  expect_in("Of a, rail mlx5_1 brought", said("slow_rail"));
}

TEST_F(ExplainPull, TellsWaitsInTheQueueFromWaitsForASource) {
  spans_.add("wait", 0ms, 300ms, &transfer_).attributes = {{"rekindle.wait", std::string("queue")}};
  EXPECT_EQ(std::ranges::count(said("wait"), '\n'), 1);
  expect_in("It waited 300.0 ms in the queue", said("wait"));
  expect_in("--max-pullers", said("wait"));
  spans_.add("wait", 0ms, 40ms, &transfer_).attributes = {{"rekindle.wait", std::string("source")}};
  expect_in("It waited 40.0 ms for a source", said("wait"));
}

TEST_F(ExplainPull, TellsWhatFailedAndWhatWasRepeated) {
  Span& handshake = spans_.add("handshake", 100ms, 200ms, &transfer_);
  handshake.attributes = {{std::string(trace::kSource), std::string("e")}};
  handshake.error = "connection refused";
  expect_in("Connecting e failed: connection refused.", said("failure"));
  EXPECT_EQ(said("repeated"), "");
}

TEST_F(ExplainPull, CountsStolenSlicesApart) {
  Spans spans;
  Span& pull = spans.add("pull", 0ms, 1000ms);
  pull.attributes = {{std::string(trace::kOperation), std::string("pull")},
                     {"rekindle.refetched_bytes", 5 * kMega}};
  Span& transfer = spans.add("transfer", 0ms, 1000ms, &pull);
  transfer.attributes = {{"rekindle.retried_slices", std::int64_t{5}},
                         {"rekindle.stolen_slices", std::int64_t{2}}};
  Span& source = spans.add("source", 0ms, 500ms, &transfer);
  source.attributes = {{std::string(trace::kSource), std::string("a")}};
  source.error = "connection reset";
  std::string text;
  for (const Finding& finding : spans.explained("pull")) text += finding.text + "\n";
  expect_in("3 slice(s) failed", text);
  expect_in("2 slice(s) were taken from a slow source", text);
  expect_in("were wrong and were fetched again", text);
  expect_in("Source a was lost: connection reset.", text);
}

TEST_F(ExplainPull, TellsForWhatItWaited) {
  const std::vector<std::pair<std::string, std::string>> reasons{
      {"holders", "for the holders"}, {"host", "another pull of this host"}, {"hold", "broadcast"}};
  for (const auto& [what, text] : reasons) {
    EXPECT_EQ(said("wait").find(text), std::string::npos);
    spans_.add("wait", 0ms, 40ms, &pull_).attributes = {{std::string(trace::kWait), what}};
    expect_in("It waited 40.0 ms", said("wait"));
    expect_in(text, said("wait"));
  }
}

// Two pulls and an update in one trace.
class ExplainSharedTrace : public ::testing::Test {
 protected:
  void pull(const std::string& version, const std::string& id, std::chrono::milliseconds end) {
    spans_.add("pull", 0ms, end).attributes = {
        {std::string(trace::kOperation), std::string("pull")},
        {std::string(trace::kVersion), version},
        {std::string(trace::kSubject), id}};
  }
  Spans spans_;
};

TEST_F(ExplainSharedTrace, TakesTheOperationThatIsNamed) {
  pull("m@1", "id1", 100ms);
  pull("m@2", "id2", 300ms);
  for (const std::string subject : {"m@1", "id1"}) {
    const auto findings = explain("pull", subject, spans_.all());
    ASSERT_FALSE(findings.empty());
    EXPECT_EQ(findings[0].kind, "outcome") << "nothing else fits " << subject;
    EXPECT_TRUE(findings[0].text.starts_with("The pull of m@1 ")) << findings[0].text;
  }
  EXPECT_TRUE(explain("pull", "m@3", spans_.all()).empty());
}

TEST_F(ExplainSharedTrace, SaysWhichOfSeveralItTookAndNamesTheOthers) {
  pull("m@1", "id1", 100ms);
  pull("m@2", "id2", 300ms);
  for (const auto& findings : {explain("pull", "m", spans_.all()), spans_.explained("pull")}) {
    ASSERT_GE(findings.size(), 2u);
    EXPECT_EQ(findings[0].text,
              "2 operations fit; this is the newest pull, m@2 on b (id2). The others: m@1 on b "
              "(id1).");
    EXPECT_TRUE(findings[1].text.starts_with("The pull of m@2 ")) << findings[1].text;
  }
}

TEST(ExplainUpdate, NamesTheRankThatHeldTheOthersUp) {
  Spans spans;
  Span& top = spans.add("update", 0ms, 1000ms);
  top.attributes = {{std::string(trace::kOperation), std::string("update")},
                    {std::string(trace::kSubject), std::string("m@2")}};
  const Span update = top;
  spans.add("gathering", 0ms, 100ms, &update);
  spans.add("loading", 100ms, 1000ms, &update);
  for (int i = 0; i < 3; ++i) {
    const auto took = i == 2 ? 900ms : 300ms;
    Span& rank = spans.add("rank", 0ms, took, &update);
    rank.attributes = {{std::string(trace::kRank), fmt::format("rank {} of i on a", i)},
                       {"rekindle.state", std::string(i == 1 ? "failed" : "ready")}};
    if (i == 1) rank.error = "it died";
    const Span parent = rank;
    spans.add("apply", 0ms, took, &parent);
  }
  std::string text;
  for (const Finding& finding : spans.explained("update")) text += finding.text + "\n";
  for (const char* part :
       {"The update to m@2 took 1.00 s for 3 ranks; 1 of them did not get it.",
        "loading 900.0 ms (90 %), gathering 100.0 ms (10 %)", "rank 1 of i on a: it died.",
        "rank 2 of i on a took 900.0 ms, 3.0 times as long as the others", "most of it was apply",
        "The phase loading bounded the update."}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

// Three ranks whose last phases end at 400 ms, 400 ms and 900 ms. The last one was not slow: it
// began late.
class ExplainPlacedUpdate : public ::testing::Test {
 protected:
  ExplainPlacedUpdate() {
    Span& top = spans_.add("update", 0ms, 1000ms);
    top.attributes = {{std::string(trace::kOperation), std::string("update")},
                      {std::string(trace::kSubject), std::string("m@2")}};
    update_ = top;
    for (int i = 0; i < 3; ++i) {
      const auto late = i == 2 ? 500ms : 0ms;
      Span& rank = spans_.add("rank", late, 1000ms, &update_);
      rank.attributes = {{std::string(trace::kRank), fmt::format("rank {} of i on a", i)},
                         {"rekindle.state", std::string("ready")}};
      ranks_.push_back(&rank);
      const Span parent = rank;
      // The broadcast is a part of the copy.
      spans_.add("copy", late, late + 200ms, &parent);
      spans_.add("spread", late + 50ms, late + 200ms, &parent);
      spans_.add("apply", late + 300ms, late + 400ms, &parent);
      spans_.add("resume", late + 400ms, 1000ms, &parent);
    }
  }
  std::string said(const std::string& kind) const {
    std::string text;
    for (const Finding& finding : spans_.explained("update")) {
      if (finding.kind == kind) text += finding.text + "\n";
    }
    return text;
  }

  Spans spans_;
  Span update_;
  std::vector<Span*> ranks_;
};

TEST_F(ExplainPlacedUpdate, NamesTheRankAndThePhaseThatItWaitedFor) {
  EXPECT_EQ(said("waited_for"),
            "The update waited for rank 2 of i on a: its phase apply ended 0.50 s after the others "
            "were done, and began 0.50 s later.\n");
  EXPECT_EQ(said("slow_rank"), "") << "its phases took as long as those of the others";
}

TEST_F(ExplainPlacedUpdate, ClaimsNothingAboutRanksThatDoNotSayWhenTheirPhasesBegan) {
  for (Span* rank : ranks_) {
    rank->attributes.push_back({std::string(trace::kPhaseStarts), std::string("unknown")});
  }
  EXPECT_EQ(said("waited_for"), "");
}

// Of two agents with two ranks each.
class ExplainPublication : public ::testing::Test {
 protected:
  ExplainPublication() {
    Span& top = spans_.add("publication", 0ms, 2000ms);
    top.attributes = {{std::string(trace::kOperation), std::string("publish")},
                      {std::string(trace::kSubject), std::string("m@1")},
                      {"rekindle.hosts", std::int64_t{2}}};
    top_ = &top;
    publication_ = top;
    Span& complete = spans_.add("roster_complete", 400ms, 400ms, &publication_);
    complete.attributes = top.attributes;
    complete.node = "coordinator";
  }
  void share(const std::string& node, std::chrono::milliseconds digest,
             const std::string& error = "") {
    Span& span = spans_.add("share", 0ms, 2000ms, &publication_);
    span.node = node;
    span.error = error;
    const Span parent = span;
    spans_.add("gather", 0ms, 400ms, &parent);
    spans_.add("write", 400ms, 1000ms, &parent);
    spans_.add("digest", 1000ms, 1000ms + digest, &parent);
  }
  void rank(int number, const std::string& node, std::chrono::milliseconds declared,
            std::chrono::milliseconds wrote) {
    Span& span = spans_.add("rank", declared, 2000ms, &publication_);
    span.node = node;
    span.attributes = {{std::string(trace::kRank), fmt::format("rank {} on {}", number, node)}};
    const Span parent = span;
    spans_.add("gather", declared, 400ms, &parent);
    spans_.add("write", 400ms, 400ms + wrote, &parent);
    spans_.add("commit", 400ms + wrote, 2000ms, &parent);
  }
  std::string said(const std::string& kind) const {
    std::string text;
    for (const Finding& finding : spans_.explained("publish")) {
      if (finding.kind == kind) text += finding.text + "\n";
    }
    return text;
  }

  Spans spans_;
  Span* top_ = nullptr;
  Span publication_;
};

TEST_F(ExplainPublication, NamesTheRankThatWroteSlowlyAndTheOneThatDeclaredLast) {
  share("b", 200ms);
  share("a", 200ms);
  rank(0, "b", 0ms, 100ms);
  rank(1, "b", 10ms, 600ms);
  rank(2, "a", 390ms, 100ms);
  rank(3, "a", 10ms, 100ms);
  EXPECT_EQ(said("which"), "") << "the beginning of the roster is no publication of its own";
  EXPECT_EQ(said("outcome"), "The joint publication of m@1 took 2.00 s on 2 host(s).\n");
  EXPECT_EQ(said("phases"),
            "The time went to write 600.0 ms (30 %), gather 400.0 ms (20 %), digest 200.0 ms (10 "
            "%).\n");
  EXPECT_EQ(said("slow_rank"), "rank 1 on b wrote for 600.0 ms; the others took 0.10 s.\n");
  EXPECT_EQ(said("late_rank"), "rank 2 on a declared last: the others waited 0.38 s for it.\n");
  EXPECT_EQ(said("slow_host"), "");
}

TEST_F(ExplainPublication, NamesTheHostThatWasSlowAndOnesThatFailed) {
  share("b", 100ms, "a is lost");
  share("a", 900ms);
  rank(0, "b", 0ms, 100ms);
  rank(1, "a", 10ms, 110ms);
  EXPECT_EQ(said("slow_host"), "a digested for 900.0 ms; the others took 0.10 s.\n");
  EXPECT_EQ(said("failure"), "b: a is lost.\n");
  EXPECT_EQ(said("slow_rank"), "");
  EXPECT_EQ(said("late_rank"), "");
}

TEST_F(ExplainPublication, SaysWhichSpansAreNotThere) {
  share("b", 100ms);
  EXPECT_EQ(said("outcome"),
            "The joint publication of m@1 took 2.00 s on 2 host(s), of which 1 left no spans "
            "here.\n");
  top_->error = "rank 3 has left";
  EXPECT_EQ(said("outcome"),
            "The joint publication of m@1 failed after 2.00 s: rank 3 has left.\n");
  top_->attributes.clear();
  EXPECT_EQ(said("outcome"),
            "The joint publication of m@1 has begun on 2 host(s), and its lead has left no span of "
            "it.\n");
}

TEST(ExplainOnePublication, SaysWhereTheTimeOfOneProcessWent) {
  Spans spans;
  Span& top = spans.add("publish", 0ms, 1000ms);
  top.attributes = {{std::string(trace::kOperation), std::string("publish")},
                    {std::string(trace::kSubject), std::string("m@1")},
                    {"rekindle.bytes", 500 * kMega}};
  const Span publication = top;
  spans.add("copy", 0ms, 900ms, &publication);
  spans.add("claim", 900ms, 1000ms, &publication);
  const auto findings = spans.explained("publish");
  ASSERT_EQ(findings.size(), 3u);
  EXPECT_TRUE(findings[0].text.starts_with("The publication of m@1 from b took 1.00 s: "))
      << findings[0].text;
  EXPECT_EQ(findings[1].text, "The time went to copy 900.0 ms (90 %), claim 100.0 ms (10 %).");
  EXPECT_EQ(findings[2].text, "The phase copy bounded the publication.");
}

TEST(ExplainRecovery, NamesThePhaseThatTookLongest) {
  Spans spans;
  Span& top = spans.add("recovery", 0ms, 1000ms);
  top.attributes = {{std::string(trace::kOperation), std::string("recovery")},
                    {std::string(trace::kSubject), std::string("chat")},
                    {std::string(trace::kVersion), std::string("m@1")},
                    {std::string(trace::kRank), std::string("0")},
                    {"rekindle.rung", std::string("local")}};
  const Span recovery = top;
  spans.add("plan", 0ms, 100ms, &recovery);
  spans.add("install", 100ms, 1000ms, &recovery);
  const auto findings = spans.explained("recovery");
  ASSERT_EQ(findings.size(), 3u);
  EXPECT_EQ(findings[0].text, "Rank 0 of chat was served m@1 again in 1.00 s, from local.");
  EXPECT_EQ(findings[2].text, "The phase install bounded the recovery.");
  EXPECT_TRUE(spans.explained("pull").empty());
}

class ExplainOneRecovery : public ::testing::Test {
 protected:
  ExplainOneRecovery() {
    Span& top = spans_.add("recovery", 0ms, 1000ms);
    top.attributes = {{std::string(trace::kOperation), std::string("recovery")},
                      {std::string(trace::kSubject), std::string("chat")},
                      {std::string(trace::kVersion), std::string("m@1")},
                      {std::string(trace::kRank), std::string("0")},
                      {"rekindle.rung", std::string("peers")}};
    recovery_ = &top;
  }
  std::string said() const {
    std::string text;
    for (const Finding& finding : spans_.explained("recovery")) {
      text += fmt::format("{}: {} {}\n", finding.kind, finding.text, finding.advice);
    }
    return text;
  }
  void expect_in(const std::string& part) const {
    EXPECT_NE(said().find(part), std::string::npos) << said();
  }
  Spans spans_;
  Span* recovery_ = nullptr;
};

TEST_F(ExplainOneRecovery, SaysWhyItFailed) {
  recovery_->error = "NO_SOURCE";
  expect_in("outcome: Rank 0 of chat did not get m@1, after 1.00 s: NO_SOURCE.");
}

TEST_F(ExplainOneRecovery, NamesItsPullWhichIsNoPhase) {
  spans_.add("wire", 0ms, 600ms, recovery_);
  spans_.add("pull", 0ms, 900ms, recovery_).attributes = {
      {std::string(trace::kOperation), std::string("pull")},
      {std::string(trace::kVersion), std::string("m@1")},
      {std::string(trace::kSubject), std::string("6f2c")}};
  expect_in("pull: The pull of m@1 to b took 900.0 ms");
  expect_in("`rekindle explain pull 6f2c`");
  expect_in("phases: The time went to wire 600.0 ms (60 %).");
}

TEST_F(ExplainOneRecovery, NamesThePullOfAnotherRankThatBroughtItsBytes) {
  recovery_->attributes.push_back({std::string(trace::kPullTrace), std::string("abcd")});
  expect_in("pull: Its bytes came with the pull of another rank.");
  expect_in("`rekindle explain pull abcd`");
}

TEST_F(ExplainOneRecovery, SaysThatTheWorkerStartedSlowly) {
  spans_.add("restart", 0ms, 900ms, recovery_);
  expect_in("bound: The phase restart bounded the recovery. Its process ended late");
}

TEST(ChromeTrace, HasTracksOnWhichSpansOnlyFollowOrContainEachOther) {
  Spans spans;
  const Span pull = spans.add("pull", 0ms, 1000ms);
  const Span transfer = spans.add("transfer", 100ms, 900ms, &pull);
  spans.source(transfer, "a", 1, 400ms);
  // Overlaps the source and is on the same track.
  spans.add("handshake", 50ms, 300ms, &transfer).attributes = {
      {std::string(trace::kSource), std::string("a")}};
  Span& other = spans.add("agent_open_session", 60ms, 70ms, &transfer);
  other.node = "c";
  const auto json = nlohmann::json::parse(to_chrome_trace(spans.all()));
  std::map<std::pair<int, int>, std::vector<std::pair<double, double>>> tracks;
  std::size_t complete = 0;
  std::set<std::string> names;
  for (const auto& event : json.at("traceEvents")) {
    if (event.at("ph") == "M") {
      names.insert(event.at("args").at("name").get<std::string>());
      continue;
    }
    ++complete;
    const double from = event.at("ts");
    tracks[{event.at("pid"), event.at("tid")}].emplace_back(from,
                                                            from + event.at("dur").get<double>());
  }
  EXPECT_EQ(complete, 5u);
  for (const char* name : {"agent b", "agent c", "operation", "source a", "source a (2)"}) {
    EXPECT_TRUE(names.contains(name)) << name;
  }
  for (const auto& [track, events] : tracks) {
    for (const auto& [from, to] : events) {
      for (const auto& [start, end] : events) {
        const bool apart = end <= from || start >= to;
        const bool nested = (start >= from && end <= to) || (start <= from && end >= to);
        EXPECT_TRUE(apart || nested);
      }
    }
  }
}

TEST(IsWanted, TakesIdsWithCapitalLettersAndInstancesAsTheyAre) {
  Spans spans;
  Span& span = spans.add("pull", 0ms, 1ms);
  span.attributes = {{std::string(trace::kOperation), std::string("pull")},
                     {std::string(trace::kSubject), std::string(30, '0') + "af"}};
  std::string id = span.context.trace.hex();
  std::ranges::transform(id, id.begin(),
                         [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  EXPECT_TRUE(is_wanted(span, "pull", id));
  EXPECT_TRUE(is_wanted(span, "pull", std::string(30, '0') + "AF"));
  EXPECT_FALSE(is_wanted(span, "update", id));
  span.attributes = {{std::string(trace::kOperation), std::string("recovery")},
                     {std::string(trace::kSubject), std::string(30, '0') + "AF"}};
  EXPECT_TRUE(is_wanted(span, "recovery", std::string(30, '0') + "AF"));
}

TEST(TraceWanted, IsAnIdAVersionOrAnInstance) {
  EXPECT_EQ(trace_wanted("4bf92f3577b34da6a3ce929d0e0e4736").operation, "");
  EXPECT_EQ(trace_wanted("m@1").operation, "update");
  EXPECT_EQ(trace_wanted("chat").operation, "recovery");
}

}  // namespace
}  // namespace rekindle::cli
