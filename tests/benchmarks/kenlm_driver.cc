// Times KenLM on a workload that workload.py wrote. Compile against a built KenLM, of which K is
// the source folder and B the build folder (cmake -DCMAKE_BUILD_TYPE=Release
// -DCMAKE_CXX_FLAGS=-march=native):
//
//   g++ -O3 -march=native -DNDEBUG -DKENLM_MAX_ORDER=6 -I K -o kenlm_driver kenlm_driver.cc
//       -L B/lib -lkenlm -lkenlm_util -lz -lbz2 -llzma -lrt
//
//   kenlm_driver KIND BINARY WORKLOAD
//
// KIND is probing, trie, quant_trie, array_trie or quant_array_trie: that of BINARY. It maps the
// model, resolves words to ids and contexts to states, and says so with a line of JSON. Then each
// line of standard input names what to time, once, and is answered with a line of JSON:
//
//   states     one Score for each query of the batches, from states prepared before
//   contexts   the same, the state of each context made from its words first
//   ids        one Score for each token of the sentences, from ids
//   strings    the same from text: split at spaces, each word looked up
//
// Time is the CPU time of this process. The sum of all scores shows that the answers are the same.

#include "lm/model.hh"
#include "util/string_piece.hh"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <time.h>

namespace {

typedef lm::WordIndex Id;
typedef lm::ngram::State State;

double CpuSeconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

// The file of Workload.write, as it stands: words are places in the table.
struct Workload {
  std::vector<std::string> table;
  std::vector<uint32_t> context_lengths, context_words, word_counts, words, lengths, tokens;

  explicit Workload(const char *path) {
    std::ifstream in(path, std::ios::binary);
    in.exceptions(std::ios::failbit | std::ios::badbit);
    uint32_t counts[8];
    in.read(reinterpret_cast<char *>(counts), sizeof(counts));
    if (counts[0] != 0x574D4C44) throw std::runtime_error(std::string(path) + " is no workload");
    std::string spelled(counts[2], '\0');
    in.read(&spelled[0], spelled.size());
    for (size_t begin = 0; table.size() < counts[1];) {
      const size_t end = spelled.find('\n', begin);
      table.push_back(spelled.substr(begin, end - begin));
      begin = end + 1;
    }
    Read(in, counts[3], context_lengths);
    Read(in, counts[4], context_words);
    Read(in, counts[3], word_counts);
    Read(in, counts[5], words);
    Read(in, counts[6], lengths);
    Read(in, counts[7], tokens);
  }

 private:
  static void Read(std::ifstream &in, size_t count, std::vector<uint32_t> &out) {
    out.resize(count);
    in.read(reinterpret_cast<char *>(out.data()), count * sizeof(uint32_t));
  }
};

struct Result {
  uint64_t queries;
  double sum;
};

// Everything is resolved here, before any timing. Model is the concrete class: no virtual call.
template <class Model> class Bench {
 public:
  Bench(const char *binary, const Workload &work)
      : model_(binary), counts_(work.word_counts), lengths_(work.lengths) {
    std::vector<Id> ids;
    for (const std::string &word : work.table) ids.push_back(model_.GetVocabulary().Index(word));
    for (uint32_t word : work.words) words_.push_back(ids[word]);
    for (uint32_t token : work.tokens) tokens_.push_back(ids[token]);

    const uint32_t *context = work.context_words.data();
    begins_.push_back(0);
    for (uint32_t length : work.context_lengths) {
      for (uint32_t i = 0; i < length; ++i) reversed_.push_back(ids[context[length - 1 - i]]);
      begins_.push_back(reversed_.size());
      context += length;
    }
    states_.resize(work.context_lengths.size());
    for (size_t i = 0; i < states_.size(); ++i) MakeState(i, states_[i]);

    const uint32_t *token = work.tokens.data();
    for (uint32_t length : work.lengths) {
      std::string line;
      for (uint32_t i = 0; i < length; ++i) line += (i ? " " : "") + work.table[*token++];
      lines_.push_back(line);
    }
  }

  Result States() const {
    double sum = 0;
    const Id *word = words_.data();
    State out;
    for (size_t i = 0; i < states_.size(); ++i) {
      const State &state = states_[i];
      for (const Id *end = word + counts_[i]; word != end; ++word) {
        sum += model_.Score(state, *word, out);
      }
    }
    return Result{words_.size(), sum};
  }

  Result Contexts() const {
    double sum = 0;
    const Id *word = words_.data();
    State state, out;
    for (size_t i = 0; i < states_.size(); ++i) {
      MakeState(i, state);
      for (const Id *end = word + counts_[i]; word != end; ++word) {
        sum += model_.Score(state, *word, out);
      }
    }
    return Result{words_.size(), sum};
  }

  Result Ids() const {
    double sum = 0;
    const Id *token = tokens_.data();
    const Id end_sentence = model_.GetVocabulary().EndSentence();
    for (uint32_t length : lengths_) {
      State a = model_.BeginSentenceState(), b;
      State *in = &a, *out = &b;
      for (const Id *end = token + length; token != end; ++token) {
        sum += model_.Score(*in, *token, *out);
        std::swap(in, out);
      }
      sum += model_.Score(*in, end_sentence, *out);
    }
    return Result{tokens_.size() + lengths_.size(), sum};
  }

  Result Strings() const {
    double sum = 0;
    const typename Model::Vocabulary &vocabulary = model_.GetVocabulary();
    for (const std::string &line : lines_) {
      State a = model_.BeginSentenceState(), b;
      State *in = &a, *out = &b;
      const char *const end = line.data() + line.size();
      for (const char *begin = line.data(); begin < end;) {
        const char *space = static_cast<const char *>(memchr(begin, ' ', end - begin));
        if (!space) space = end;
        const Id id = vocabulary.Index(StringPiece(begin, space - begin));
        sum += model_.Score(*in, id, *out);
        std::swap(in, out);
        begin = space + 1;
      }
      sum += model_.Score(*in, vocabulary.EndSentence(), *out);
    }
    return Result{tokens_.size() + lengths_.size(), sum};
  }

 private:
  void MakeState(size_t i, State &state) const {
    model_.GetState(&reversed_[begins_[i]], &reversed_[begins_[i + 1]], state);
  }

  Model model_;
  std::vector<uint32_t> counts_, lengths_;
  std::vector<Id> words_, tokens_, reversed_;
  std::vector<size_t> begins_;
  std::vector<State> states_;
  std::vector<std::string> lines_;
};

template <class Model> int Serve(const char *binary, const char *workload) {
  const Bench<Model> bench(binary, Workload{workload});
  std::printf("{\"ready\": true}\n");
  std::fflush(stdout);
  for (std::string what; std::getline(std::cin, what);) {
    Result (Bench<Model>::*run)() const;
    if (what == "states") run = &Bench<Model>::States;
    else if (what == "contexts") run = &Bench<Model>::Contexts;
    else if (what == "ids") run = &Bench<Model>::Ids;
    else if (what == "strings") run = &Bench<Model>::Strings;
    else throw std::runtime_error("nothing is called " + what);
    const double began = CpuSeconds();
    const Result result = (bench.*run)();
    const double took = CpuSeconds() - began;
    std::printf("{\"cpu_s\": %.9f, \"queries\": %llu, \"sum\": %.17g, \"ns_per_query\": %.2f}\n",
                took, static_cast<unsigned long long>(result.queries), result.sum,
                took * 1e9 / result.queries);
    std::fflush(stdout);
  }
  return 0;
}

int Run(const std::string &kind, const char *binary, const char *workload) {
  if (kind == "probing") return Serve<lm::ngram::ProbingModel>(binary, workload);
  if (kind == "trie") return Serve<lm::ngram::TrieModel>(binary, workload);
  if (kind == "quant_trie") return Serve<lm::ngram::QuantTrieModel>(binary, workload);
  if (kind == "array_trie") return Serve<lm::ngram::ArrayTrieModel>(binary, workload);
  if (kind == "quant_array_trie") return Serve<lm::ngram::QuantArrayTrieModel>(binary, workload);
  throw std::runtime_error("no kind of model is called " + kind);
}

}  // namespace

int main(int argc, char **argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: %s KIND BINARY WORKLOAD\n", argv[0]);
    return 2;
  }
  try {
    return Run(argv[1], argv[2], argv[3]);
  } catch (const std::exception &problem) {
    std::fprintf(stderr, "%s: %s\n", argv[0], problem.what());
    return 1;
  }
}
