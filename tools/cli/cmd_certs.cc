#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "tools/cli/arguments.h"
#include "tools/cli/certificate_directory.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/output.h"

// `rekindle certs`: the certificates of a fleet that has no authority of its own.
namespace rekindle::cli {
namespace {

constexpr int kAuthorityDays = 3653;
constexpr int kCertificateDays = 90;

struct CertsArgs {
  std::filesystem::path directory;
  std::string trust_domain = "rekindle.local";
  std::string role, name;
  std::vector<std::string> dns_names, addresses;
  int days = kCertificateDays;
  std::string within;
  bool force = false;
  bool authority = false;
  bool drop_old = false;
};

std::string utc_date(crypto::CertificateTime time) {
  return utc_time(static_cast<std::uint64_t>(time.time_since_epoch().count()) * 1'000'000)
             .substr(0, 19) +
         "Z";
}

Result<int> init(const Settings& settings, const CertsArgs& args) {
  TRY(const auto made, CertificateDirectory::create(args.directory, args.trust_domain,
                                                    std::chrono::days(args.days), args.force));
  const std::string ends = utc_date(made.authority().ends);
  print_result(
      settings.json,
      {{"directory", args.directory.string()}, {"trust_domain", args.trust_domain}, {"ends", ends}},
      fmt::format("{} has an authority for {} until {}.\n"
                  "Keep ca.pem secret, on one machine. Copy ca.crt and ca.crl to all hosts.\n"
                  "Next: rekindle certs issue {} agent NODE\n",
                  printable(args.directory.string()), args.trust_domain, ends,
                  printable(args.directory.string())));
  return kExitOk;
}

Result<int> issue(const Settings& settings, const CertsArgs& args) {
  TRY_VOID(check_subject({args.role, args.name}));
  TRY(auto directory, CertificateDirectory::open(args.directory));
  TRY(const auto file, directory.issue({.subject = {args.role, args.name},
                                        .dns_names = args.dns_names,
                                        .addresses = args.addresses,
                                        .life = std::chrono::days(args.days),
                                        .force = args.force}));
  TRY(const std::string pem, read_text_file(file));
  TRY(const auto facts, crypto::read_certificate(pem));
  print_result(settings.json,
               {{"file", file.string()},
                {"uri", facts.uris.front()},
                {"serial", facts.serial},
                {"ends", utc_date(facts.ends)}},
               fmt::format("{} is {} until {}.\n"
                           "It has the key, too: --tls-cert and --tls-key take this one file.\n",
                           printable(file.string()), facts.uris.front(), utc_date(facts.ends)));
  return kExitOk;
}

Result<int> rotate(const Settings& settings, const CertsArgs& args) {
  std::optional<std::chrono::seconds> within;
  if (!args.within.empty()) {
    TRY(const auto time, parse_duration("--within", args.within));
    within = std::chrono::duration_cast<std::chrono::seconds>(time);
  }
  TRY(auto directory, CertificateDirectory::open(args.directory));
  const std::string path = printable(args.directory.string());
  if (args.authority) {
    TRY_VOID(directory.begin_authority_rotation());
    print_result(settings.json, {{"authority", utc_date(directory.authority().ends)}},
                 fmt::format("{} has a new authority. ca.crt holds both.\n"
                             "1. Copy ca.crt and ca.crl to all hosts.\n"
                             "2. rekindle certs rotate {}, and copy the new certificates.\n"
                             "3. rekindle certs rotate {} --drop-old-ca, and copy ca.crt and "
                             "ca.crl again.\n",
                             path, path, path));
    return kExitOk;
  }
  if (args.drop_old) {
    TRY_VOID(directory.end_authority_rotation());
    print_result(
        settings.json, {{"authority", utc_date(directory.authority().ends)}},
        fmt::format("{} has one authority again. Copy ca.crt and ca.crl to all hosts.\n", path));
    return kExitOk;
  }
  TRY(const auto renewed, directory.renew(within));
  Json files = Json::array();
  std::string text;
  for (const auto& subject : renewed) {
    files.push_back(directory.file_of(subject).string());
    text += printable(directory.file_of(subject).string()) + " is renewed.\n";
  }
  if (renewed.empty()) text = "No certificate is due.\n";
  print_result(settings.json, {{"renewed", files}}, text);
  return kExitOk;
}

Result<int> revoke(const Settings& settings, const CertsArgs& args) {
  TRY_VOID(check_subject({args.role, args.name}));
  TRY(auto directory, CertificateDirectory::open(args.directory));
  TRY(const std::size_t revoked, directory.revoke({args.role, args.name}));
  print_result(
      settings.json, {{"revoked", revoked}},
      revoked == 0
          ? fmt::format("{} {} has no certificate that is valid.\n", args.role, args.name)
          : fmt::format("{} certificates of {} {} are revoked. Copy ca.crl to all hosts.\n",
                        revoked, args.role, args.name));
  return kExitOk;
}

const char* state_of(const CertificateDirectory::Entry& entry) {
  const auto now = std::chrono::floor<std::chrono::seconds>(std::chrono::system_clock::now());
  if (entry.revoked) return "revoked";
  if (entry.facts.ends < now) return "ended";
  if (!entry.current) return "replaced";
  if (!entry.of_newest) return "former authority";
  return "valid";
}

Result<int> list(const Settings& settings, const CertsArgs& args) {
  TRY(const auto directory, CertificateDirectory::open(args.directory));
  TRY(const auto entries, directory.list());
  Json json = Json::array();
  std::vector<std::vector<std::string>> rows;
  for (const auto& entry : entries) {
    const std::string ends = utc_date(entry.facts.ends);
    json.push_back({{"role", entry.subject.role},
                    {"name", entry.subject.name},
                    {"uri", entry.facts.uris.front()},
                    {"serial", entry.facts.serial},
                    {"ends", ends},
                    {"state", state_of(entry)}});
    rows.push_back(
        {entry.subject.role, entry.subject.name, state_of(entry), ends, entry.facts.serial});
  }
  print_result(settings.json,
               {{"trust_domain", directory.trust_domain()},
                {"authority_ends", utc_date(directory.authority().ends)},
                {"certificates", json}},
               table({{"ROLE"}, {"NAME"}, {"STATE"}, {"ENDS"}, {"SERIAL"}}, rows));
  return kExitOk;
}

using Body = Result<int> (*)(const Settings&, const CertsArgs&);

Command add_part(Command& certs, Session& session, const std::shared_ptr<CertsArgs>& args,
                 const char* name, const char* about, Body body) {
  Command sub = certs.command(name, about);
  sub.option("DIR", args->directory, "Directory of the authority").required();
  sub.runs(session, "certs", [&session, args, body] { return body(session.settings, *args); });
  return sub;
}

void add_subject(Command& sub, CertsArgs& args) {
  sub.option("ROLE", args.role, "coordinator, agent, puller or client").required();
  sub.option("NAME", args.name,
             "Of an agent its --node-id; else a name of your choice. '*': none, for all processes\n"
             "of the role, as in a DaemonSet")
      .required();
}

}  // namespace

void add_certs(Command& app, Session& session) {
  Command certs = app.command(
      "certs",
      "Certificates for a fleet that has no authority of its own: make one, issue, renew and "
      "revoke.\nFiles are replaced at once as a whole, so daemons that read them again never see "
      "a\n"
      "key without its certificate. The directory belongs on one machine, not on each host.");
  certs.require_command();
  const auto shared = [] { return std::make_shared<CertsArgs>(); };

  auto args = shared();
  args->days = kAuthorityDays;
  Command made = add_part(certs, session, args, "init",
                          "Make an authority: ca.pem (secret), ca.crt and ca.crl", init);
  made.option("--trust-domain", args->trust_domain,
              "The first part of all names: spiffe://NAME/rekindle/… [rekindle.local]")
      .type_name("NAME");
  made.option("--days", args->days, "How long the authority is valid [3653]")
      .type_name("N")
      .between(1, 36'500);
  made.flag("--force", args->force, "Replace the authority that is there [off]");

  args = shared();
  Command issued = add_part(certs, session, args, "issue",
                            "Issue a key and certificate in one file: ROLE-NAME.pem", issue);
  add_subject(issued, *args);
  issued.option("--dns", args->dns_names, "Also a name in DNS; may be repeated")
      .type_name("NAME")
      .one_word();
  issued.option("--ip", args->addresses, "Also an IP address; may be repeated")
      .type_name("ADDRESS")
      .one_word();
  issued.option("--days", args->days, "How long it is valid [90]").type_name("N").between(1, 3653);
  issued.flag("--force", args->force, "Replace the file that is there [off]");

  args = shared();
  Command rotated = add_part(
      certs, session, args, "rotate",
      "Renew the certificates that end soon, each with a new key, in the files where they are.\n"
      "Revoked ones are left alone. To change the authority: --ca, then without, then "
      "--drop-old-ca.",
      rotate);
  const auto within = rotated
                          .option("--within", args->within,
                                  "Renew what ends within this time [a third of its life]")
                          .type_name("TIME");
  const auto authority =
      rotated.flag("--ca", args->authority, "Make a new authority; hosts trust both [off]");
  auto drop = rotated.flag("--drop-old-ca", args->drop_old,
                           "Trust the new authority only, once all certificates are of it [off]");
  drop.excludes(authority).excludes(within);
  CommandOption(authority).excludes(within);

  args = shared();
  Command revoked = add_part(certs, session, args, "revoke",
                             "Revoke all certificates of a name. The list is ca.crl", revoke);
  add_subject(revoked, *args);

  args = shared();
  add_part(certs, session, args, "list", "List the certificates that were issued", list);
}

}  // namespace rekindle::cli
