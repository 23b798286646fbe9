// Scores a sentence and takes two steps of a beam search, by HTTP, with Go's own library alone.
// Usage: go run score.go [URL] [TOKEN]
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"os"
	"sort"
	"time"
)

type object = map[string]any

type hypothesis struct {
	words string
	total float32
	state []byte // in JSON, base64
}

var (
	url, token = "http://localhost:8080", ""
	client     = http.Client{Timeout: time.Second}
)

// ask calls a method of the gateway. Numbers of the reply are read as the float32 that they are.
func ask(call string, request object, reply any) {
	body, _ := json.Marshal(request)
	post, err := http.NewRequest("POST", url+"/dlm.v1.LanguageModel/"+call, bytes.NewReader(body))
	if err != nil {
		log.Fatal(err)
	}
	post.Header.Set("Content-Type", "application/json")
	post.Header.Set("Connect-Timeout-Ms", "1000")
	if token != "" {
		post.Header.Set("Authorization", "Bearer "+token)
	}
	answer, err := client.Do(post)
	if err != nil {
		log.Fatal(err)
	}
	defer answer.Body.Close()
	read := json.NewDecoder(answer.Body)
	if answer.StatusCode != http.StatusOK {
		var refused struct{ Reason, Message string }
		_ = read.Decode(&refused)
		log.Fatal(answer.Status, ": ", refused.Reason, ": ", refused.Message)
	}
	if err := read.Decode(reply); err != nil {
		log.Fatal(err)
	}
}

func main() {
	for at, argument := range os.Args[1:] {
		*[]*string{&url, &token}[at] = argument
	}
	var sentences struct {
		Scores []struct {
			Log10Prob  float64
			Log10Probs []float32
		}
	}
	ask("Score", object{"sentences": []string{"the man went home"}}, &sentences)
	fmt.Println(sentences.Scores[0].Log10Prob, sentences.Scores[0].Log10Probs)

	// A beam of two: each step scores every word after every state, and keeps the two best.
	beam := []hypothesis{{state: []byte{}}}
	for _, words := range [][]string{{"the", "a", "there"}, {"man", "is"}} {
		states := [][]byte{}
		for _, one := range beam {
			states = append(states, one.state)
		}
		var found struct {
			Log10Probs []float32
			States     [][]byte
		}
		ask("Extend", object{"states": states, "words": words}, &found)
		next := []hypothesis{}
		for row, one := range beam {
			for column, word := range words {
				at := row*len(words) + column
				total := one.total + found.Log10Probs[at]
				next = append(next, hypothesis{one.words + " " + word, total, found.States[at]})
			}
		}
		sort.SliceStable(next, func(i, j int) bool { return next[i].total > next[j].total })
		beam = next[:2]
	}
	for _, one := range beam {
		fmt.Printf("%v%s\n", one.total, one.words)
	}
}
