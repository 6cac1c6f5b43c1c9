"""English words by which `mempipe.masking.entities.RuleFinder` tells names from other words, and persons from the rest;
all in lower case.
"""

from __future__ import annotations

LIGHT = frozenset(
    ["of", "the", "de", "da", "di", "del", "della", "van", "von", "der", "den", "la", "le", "du", "al", "bin", "ibn"]
)
"""Words that may occur inside a name: "University of Oxford", "Leonardo da Vinci"."""
PARTICLES = LIGHT | {"and", "y", "e", "for", "in", "on", "at", "to"}
"""Words that begin no name."""

_NO_NAMES = """
    a an the this that these those it its he she his her him they their them we our us you your i my me in on at to
    of for from by with as and or but if when while where who which what whose how why there here after before
    during since until although though because however also then thus both each every all some many most other
    another such no not only one two three first second is are was were be been being has have had do does did can
    could will would may might must shall should according despite following founded located born known based early
    late today currently originally formerly
"""
NO_NAMES = frozenset(_NO_NAMES.split())
"""Words that begin a sentence with a capital and are not names."""

_NOT_PERSONS = """
    of the and for in on at to
    academy act administration agency air airlines airport airways alliance apartments area army arts assembly
    association avenue award awards band bank base basin battalion battle bay beach board books bridge brigade
    britain brothers building bureau cabinet canal canyon castle cathedral cemetery center central centre chamber
    championship championships channel chapel chart charter church cinema circuit circus city club co coast code
    college commission committee communications community company confederation conference congress constitution
    convention cooperation corp corporation council county court creek crown cup daily dam dance data defence
    defense democratic department desert district division dragons duchy dynasty eagles east election elections
    electric embassy empire energy engineering entertainment estate exchange exhibition express falls farm
    federation festival film films fleet force forces forest fort foundation front fund gallery games garden gardens
    gas gate general group guard guild gulf hall harbor harbour heights high highway hill hills history holdings
    hospital hotel hotels house inc industries institute institution insurance international island islands isle
    journal junction kingdom laboratory lake lakes land language law laws league legion library lighthouse limited
    line lions live llc love ltd magazine mail mall manor marathon marine market medal media memorial metro mill
    mills mine mines ministry mission model monastery monument motor motors mount mountain mountains movement movie
    museum music musical national navy network news newspaper north northern observatory ocean office oil olympic
    olympics open opera orchestra order organisation organization pacific palace park parliament partners party pass
    path peninsula philharmonic pictures plan plateau players plaza police port post prefecture press prison prize
    productions program programme project province publications publishing pyramid radio railroad railway range
    records regiment region republic research reserve reservoir resort restaurant revolution rights river road rocks
    roses route royal russia school schools science sciences sea senate series service services shipyard shore show
    singles sisters skyscraper society software solutions song songs south southern sports squadron square stadium
    state states station stone strait street studio studios summit symphony syndrome synod system systems tavern
    team technologies technology telegraph television temple tennis territory testament theater theatre theory times
    today tour tower town township track trade trail treaty tribune trilogy trophy trust tunnel tv union united
    universal universe university valley village volcano war wars water waterfall weekly west western wildlife woods
    world year years zone zoo
    africa aires america angeles arabia asia australia austria canada carolina china columbia dakota england europe
    france francisco germany hampshire india ireland jersey kong korea lanka mexico rica rico scotland virginia
    wales york zealand
"""
NOT_PERSONS = frozenset(_NOT_PERSONS.split())
"""Words of names that are not persons': of organisations, places, events and works."""

_NOT_FIRST_NAMES = """
    african american ancient antarctic arctic asian australian austrian belgian black blue brazilian british
    canadian catholic chinese christian costa czech danish dutch eastern egyptian el english european federal
    finnish fort french german grand great greek green hong hungarian indian irish islamic italian japanese jewish
    korean las latin little los lower mexican middle mount native new norwegian ottoman papua persian polish port
    portuguese puerto red roman russian saint san santa sao scottish soviet spanish sri st summer super swedish
    swiss tibetan turkish upper welsh white winter
"""
NOT_FIRST_NAMES = frozenset(_NOT_FIRST_NAMES.split())
"""First words of names that are not persons'."""
